"""Rates of steps that ran, and what several measurements come to."""

from dataclasses import replace

import pytest

from zinf.plan import (
    Decide,
    Instruction,
    Link,
    Rates,
    Run,
    Timeline,
    Transfer,
    Update,
    measured_rates,
    median_rates,
    predict,
    slowest_rates,
)
from zinf.plan.instruction import Pass
from zinf.program import Tier

USUAL = Rates()


def move(link: Link, nbytes: int) -> Instruction:
    return Instruction(Transfer((), Tier.HOST, Tier.NVME), link, (), nbytes=nbytes)


def compute(flops: int) -> Instruction:
    run = Run(0, "s", Pass.FORWARD, 0)
    return Instruction(run, Link.DEVICE, (), flops=flops)


def times(rates: Rates, factor: float) -> Rates:
    """A machine that does everything so many times as fast."""
    links, updates = rates.link_bytes_per_second, rates.update_bytes_per_second
    return Rates(
        {link: factor * rate for link, rate in links.items()},
        factor * rates.flops_per_second,
        {tier: factor * rate for tier, rate in updates.items()},
        rates.overhead_seconds / factor,
        factor * rates.exchange_bytes_per_second,
    )


def test_rates_that_a_clock_measured_are_those_that_it_went_by() -> None:
    rates = Rates(
        link_bytes_per_second={
            Link.NVME_READ: 2.0,
            Link.NVME_WRITE: 3.0,
            Link.H2D: 5.0,
            Link.D2H: 7.0,
        },
        flops_per_second=11.0,
        update_bytes_per_second={Tier.DEVICE: 13.0, Tier.HOST: 17.0},
        overhead_seconds=0.25,
    )
    decide = Instruction(Decide((), ()), Link.HOST, ())
    plan = [decide, decide]
    plan += [move(link, 10) for link in rates.link_bytes_per_second]
    plan += [compute(10), compute(30)]
    for tier, link in ((Tier.DEVICE, Link.DEVICE), (Tier.HOST, Link.HOST)):
        plan.append(Instruction(Update(0, "s", tier), link, (), nbytes=10))
    measured = measured_rates(plan, predict(plan, rates), Rates())
    assert measured.overhead_seconds == pytest.approx(0.25)
    assert measured.flops_per_second == pytest.approx(11.0)
    links = measured.link_bytes_per_second
    assert links == pytest.approx(rates.link_bytes_per_second)
    updates = measured.update_bytes_per_second
    assert updates == pytest.approx(rates.update_bytes_per_second)


def test_what_a_step_had_none_of_keeps_its_rate() -> None:
    plan = [move(Link.H2D, 10)]
    usual = replace(USUAL, overhead_seconds=0.0)
    measured = measured_rates(plan, Timeline((0.0,), (2.0,)), usual)
    links = USUAL.link_bytes_per_second | {Link.H2D: 5.0}
    assert measured.link_bytes_per_second == pytest.approx(links)
    assert measured.flops_per_second == USUAL.flops_per_second
    assert measured.update_bytes_per_second == USUAL.update_bytes_per_second


def test_of_several_steps_each_rate_is_the_median() -> None:
    found = [times(USUAL, 2), USUAL, times(USUAL, 8)]
    assert median_rates(found) == times(USUAL, 2)
    slow_drive = USUAL.link_bytes_per_second | {Link.NVME_READ: 1.0}
    found[2] = replace(USUAL, link_bytes_per_second=slow_drive)
    assert median_rates(found) == USUAL


def test_of_several_processes_each_rate_is_the_slowest() -> None:
    found = [times(USUAL, 2), times(USUAL, 0.5), USUAL]
    assert slowest_rates(found) == times(USUAL, 0.5)
    found = [USUAL, replace(USUAL, overhead_seconds=1.0)]
    assert slowest_rates(found) == found[1]
