"""Rates of links, devices and updates, measured in steps that ran."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from zinf.core.plan.cost import Rates, Timeline
from zinf.core.plan.instruction import Instruction, Update
from zinf.core.program import Link, Tier

Key = TypeVar("Key")
Pick = Callable[[list[float]], float]


def measured_rates(
    instructions: Sequence[Instruction], timeline: Timeline, otherwise: Rates
) -> Rates:
    """The rates of one measured step, to predict the next one.

    The overhead is the median time of instructions with no bytes and no flops. Each
    rate is the total work of its kind over the total time less overheads.

    Args:
        timeline: the measured times of exactly these instructions.
        otherwise: rates for kinds of work that the step does not have.
    """
    seconds = [b - a for a, b in zip(timeline.start, timeline.end, strict=True)]
    idle = [
        s
        for i, s in zip(instructions, seconds, strict=True)
        if not i.link.only_frees and not i.nbytes and not i.flops
    ]
    overhead = median(idle) if idle else otherwise.overhead_seconds
    work: dict[Link | Tier | None, float] = {}
    spent: dict[Link | Tier | None, float] = {}
    for instruction, took in zip(instructions, seconds, strict=True):
        key, amount = _work(instruction)
        if amount:
            work[key] = work.get(key, 0.0) + amount
            spent[key] = spent.get(key, 0.0) + max(took - overhead, 1e-9)
    rates = {key: amount / spent[key] for key, amount in work.items()}
    links, tiers = otherwise.link_bytes_per_second, otherwise.update_bytes_per_second
    return Rates(
        {link: rates.get(link, links[link]) for link in links},
        rates.get(None, otherwise.flops_per_second),
        {tier: rates.get(tier, tiers[tier]) for tier in tiers},
        overhead,
        otherwise.exchange_bytes_per_second,
    )


def _work(instruction: Instruction) -> tuple[Link | Tier | None, float]:
    """The key of an instruction's rate, and its amount of work.

    The work is bytes for a link, or for the tier of an update, and floating-point
    operations for the key None.
    """
    if isinstance(instruction.operation, Update):
        return instruction.operation.tier, instruction.nbytes
    if instruction.flops:
        return None, instruction.flops
    return instruction.link, instruction.nbytes


def median_rates(found: Sequence[Rates]) -> Rates:
    """The median of each rate over one or more measurements."""
    return _combined(found, median, median)


def slowest_rates(found: Sequence[Rates]) -> Rates:
    """The slowest of each rate, for processes that wait for each other."""
    return _combined(found, min, max)


def _combined(found: Sequence[Rates], rate: Pick, seconds: Pick) -> Rates:
    return Rates(
        _each([x.link_bytes_per_second for x in found], rate),
        rate([x.flops_per_second for x in found]),
        _each([x.update_bytes_per_second for x in found], rate),
        seconds([x.overhead_seconds for x in found]),
        rate([x.exchange_bytes_per_second for x in found]),
    )


def _each(found: Sequence[Mapping[Key, float]], pick: Pick) -> dict[Key, float]:
    return {key: pick([x[key] for x in found]) for key in found[0]}
