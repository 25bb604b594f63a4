"""What links, devices and updates did in steps that ran, to predict others with."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from zinf.plan.cost import Rates, Timeline
from zinf.plan.instruction import Instruction, Link, Update
from zinf.program import Tier

Key = TypeVar("Key")
Pick = Callable[[list[float]], float]


def measured_rates(
    instructions: Sequence[Instruction], timeline: Timeline, otherwise: Rates
) -> Rates:
    """What the links did in a step, to predict the next one with.

    The overhead of an instruction is the median of those that move and compute nothing
    to speak of; a rate is what all others of a kind did in the rest of their time.

    Args:
        timeline: measured, of exactly these instructions.
        otherwise: for what the step had none of.
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
    """Which rate an instruction goes at, and how much it has to do.

    Bytes of a link or of updates on a tier; for None floating-point operations.
    """
    if isinstance(instruction.operation, Update):
        return instruction.operation.tier, instruction.nbytes
    if instruction.flops:
        return None, instruction.flops
    return instruction.link, instruction.nbytes


def median_rates(found: Sequence[Rates]) -> Rates:
    """The median of each rate, of one or more measurements."""
    return _combined(found, median, median)


def slowest_rates(found: Sequence[Rates]) -> Rates:
    """The slowest of each, as of processes that wait for each other."""
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
