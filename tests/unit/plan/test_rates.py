"""Plans on a clock: predicted from rates, and rates measured in steps that ran."""

from dataclasses import replace
from itertools import combinations, permutations
from random import Random
from statistics import median

import pytest

from zinf.core.plan import (
    Decide,
    Exchange,
    Free,
    Instruction,
    Link,
    Rates,
    Run,
    Timeline,
    Transfer,
    Update,
    accelerator_rates,
    bound_seconds,
    measured_rates,
    median_rates,
    predict,
    slowest_rates,
)
from zinf.core.plan.cost import duration
from zinf.core.plan.instruction import Pass
from zinf.core.program import Tier

LINKS = Link.NVME_READ, Link.NVME_WRITE, Link.H2D, Link.D2H
# One byte takes a second, on any link.
UNIT = Rates(
    link_bytes_per_second=dict.fromkeys(LINKS, 1.0),
    flops_per_second=1.0,
    update_bytes_per_second={Tier.DEVICE: 1.0, Tier.HOST: 0.5},
    overhead_seconds=0.0,
    exchange_bytes_per_second=1.0,
)
USUAL = Rates()


def move(link: Link, nbytes: int, *after: int) -> Instruction:
    return Instruction(Transfer((), Tier.HOST, Tier.NVME), link, after, nbytes=nbytes)


def compute(flops: int, *after: int) -> Instruction:
    run = Run(0, "s", Pass.FORWARD, 0)
    return Instruction(run, Link.DEVICE, after, flops=flops)


def update(tier: Tier, nbytes: int) -> Instruction:
    link = Link.DEVICE if tier == Tier.DEVICE else Link.HOST
    return Instruction(Update(0, "s", tier), link, (), nbytes=nbytes)


def test_one_link_runs_in_order_and_different_links_at_once() -> None:
    plan = [move(Link.H2D, 2), move(Link.H2D, 3), move(Link.D2H, 3), compute(4, 0)]
    plan += [move(Link.D2H, 1, 0, 1)]
    timeline = predict(plan, UNIT)
    # The last one waits for the later of the two.
    assert timeline == Timeline((0, 2, 0, 2, 5), (2, 5, 3, 6, 6))
    assert timeline.seconds == 6
    assert timeline.busy_seconds(plan) == {Link.H2D: 5, Link.D2H: 4, Link.DEVICE: 4}
    assert predict([], UNIT).seconds == 0


def test_durations_are_overhead_and_work_over_rate() -> None:
    assert duration(update(Tier.DEVICE, 10), UNIT) == 10
    assert duration(update(Tier.HOST, 10), UNIT) == 20
    free = Instruction(Free((), Tier.HOST), Link.FREE_AT_ONCE, (), nbytes=9)
    slow = replace(UNIT, overhead_seconds=7.0)
    assert duration(move(Link.H2D, 3), slow) == 7 + 3
    assert duration(free, slow) == 0
    # Bytes are sent behind the flops, or else after them.
    for hidden, seconds in ((2, 5 + 3), (9, 9 + 3)):
        run = replace(compute(5), exchange=Exchange(hidden, 3))
        assert duration(run, UNIT) == seconds


def test_fixed_rates_are_those_of_two_cores_and_of_an_accelerator() -> None:
    """Every shipped plan and its golden tests go by them: a change shows here."""
    links = dict(zip(LINKS, (3e9, 3e9, 6e9, 6e9), strict=True))
    updates = {Tier.HOST: 8e9, Tier.DEVICE: 3e9}
    assert Rates() == Rates(links, 6e10, updates, 2e-4, 2e9)
    links = dict(zip(LINKS, (5e9, 4e9, 25e9, 25e9), strict=True))
    updates = {Tier.HOST: 30e9, Tier.DEVICE: 8e11}
    assert accelerator_rates() == Rates(links, 4e14, updates, 5e-5, 25e9)


def test_a_drive_that_was_measured_replaces_two_rates() -> None:
    links = UNIT.on_drive(3.0, 4.0).link_bytes_per_second
    assert [links[link] for link in LINKS] == [3.0, 4.0, 1.0, 1.0]


def times(factor: float) -> Rates:
    """A machine that does everything so many times as fast as usual."""
    links, updates = USUAL.link_bytes_per_second, USUAL.update_bytes_per_second
    return Rates(
        {link: factor * rate for link, rate in links.items()},
        factor * USUAL.flops_per_second,
        {tier: factor * rate for tier, rate in updates.items()},
        USUAL.overhead_seconds / factor,
        factor * USUAL.exchange_bytes_per_second,
    )


def test_rates_that_a_clock_measured_are_those_that_it_went_by() -> None:
    rates = Rates(
        dict(zip(LINKS, (2.0, 3.0, 5.0, 7.0), strict=True)),
        11.0,
        {Tier.DEVICE: 13.0, Tier.HOST: 17.0},
        0.25,
    )
    decide = Instruction(Decide((), ()), Link.HOST, ())
    free = Instruction(Free((), Tier.HOST), Link.FREE_AT_ONCE, ())
    plan = [decide, free, free, free, decide, compute(10), compute(30)]
    plan += [move(link, n) for link in LINKS for n in (10, 20)]
    plan += [update(Tier.DEVICE, 10), update(Tier.HOST, 10)]
    measured = measured_rates(plan, predict(plan, rates), Rates())
    assert measured.overhead_seconds == pytest.approx(0.25)
    assert measured.flops_per_second == pytest.approx(11.0)
    links, updates = measured.link_bytes_per_second, measured.update_bytes_per_second
    assert links == pytest.approx(rates.link_bytes_per_second)
    assert updates == pytest.approx(rates.update_bytes_per_second)


def test_what_a_step_had_none_of_keeps_its_rate() -> None:
    usual = replace(USUAL, overhead_seconds=0.0)
    measured = measured_rates([move(Link.H2D, 10)], Timeline((0.0,), (2.0,)), usual)
    links = USUAL.link_bytes_per_second | {Link.H2D: 5.0}
    assert measured == replace(usual, link_bytes_per_second=links)


def test_of_steps_the_median_rates_are_taken_and_of_processes_the_slowest() -> None:
    found = [times(2), USUAL, times(8)]
    assert median_rates(found) == times(2)
    assert slowest_rates(found) == USUAL
    slow_drive = USUAL.link_bytes_per_second | {Link.NVME_READ: 1.0}
    found[2] = replace(USUAL, link_bytes_per_second=slow_drive)
    assert median_rates(found) == USUAL
    assert slowest_rates(found) == found[2]
    late = replace(USUAL, overhead_seconds=1.0)
    assert slowest_rates([USUAL, late]) == late


# The bound of a step, beside the best of all orders of a few instructions.

THREE = Link.NVME_READ, Link.H2D, Link.NVME_WRITE


def program_of(random: Random) -> list[Instruction]:
    """Instructions that wait for some of those before them."""
    return [
        move(
            random.choice(THREE),
            random.randint(1, 9),
            *(j for j in range(number) if random.random() < 0.4),
        )
        for number in range(6)
    ]


def reordered(program: list[Instruction], order: tuple[int, ...]) -> list[Instruction]:
    place = {number: k for k, number in enumerate(order)}
    return [
        replace(program[number], after=tuple(place[j] for j in program[number].after))
        for number in order
    ]


def test_no_order_beats_the_bound_and_few_miss_it_by_much() -> None:
    ratios = []
    for seed in range(60):
        program = program_of(Random(seed))
        # Of all orders in which each comes behind what it waits for.
        best = min(
            predict(reordered(program, order), UNIT).seconds
            for order in permutations(range(len(program)))
            if all(i not in program[j].after for j, i in combinations(order, 2))
        )
        ratios.append(best / bound_seconds(program, UNIT))
    assert min(ratios) > 1 - 1e-9
    assert median(ratios) < 1 + 1e-9


def test_what_waits_only_for_memory_does_not_wait() -> None:
    free = Instruction(Free((), Tier.HOST), Link.FREE_AFTER_NVME_READ, (0,), nbytes=2)
    program = [move(Link.NVME_READ, 2), free, move(Link.H2D, 3, 1)]
    assert predict(program, UNIT).seconds == 5
    assert bound_seconds(program, UNIT) == 3
