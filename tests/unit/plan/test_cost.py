"""A plan on a clock: links run at once, each in its own order."""

import pytest

from zinf.plan import Free, Instruction, Link, Rates, Run, Transfer, Update
from zinf.plan.cost import (
    Timeline,
    accelerator_rates,
    duration,
    predict,
)
from zinf.plan.instruction import Pass
from zinf.program import Tier

# One byte takes a second, on any link.
UNIT = Rates(
    link_bytes_per_second=dict.fromkeys(
        (Link.NVME_READ, Link.NVME_WRITE, Link.H2D, Link.D2H), 1.0
    ),
    flops_per_second=1.0,
    update_bytes_per_second={Tier.DEVICE: 1.0, Tier.HOST: 0.5},
    overhead_seconds=0.0,
)


def move(link: Link, seconds: int, *after: int) -> Instruction:
    return Instruction(Transfer((), Tier.HOST, Tier.NVME), link, after, nbytes=seconds)


def compute(seconds: int, *after: int) -> Instruction:
    run = Run(0, "s", Pass.FORWARD, 0)
    return Instruction(run, Link.DEVICE, after, flops=seconds)


def test_one_link_runs_in_order() -> None:
    timeline = predict([move(Link.H2D, 2), move(Link.H2D, 3)], UNIT)
    assert timeline == Timeline((0.0, 2.0), (2.0, 5.0))


def test_a_link_is_busy_while_its_instructions_run() -> None:
    plan = [move(Link.H2D, 2), compute(4, 0), move(Link.H2D, 3, 1)]
    busy_seconds = predict(plan, UNIT).busy_seconds(plan)
    assert busy_seconds == {Link.H2D: 2 + 3, Link.DEVICE: 4}


def test_different_links_run_at_once() -> None:
    timeline = predict([move(Link.H2D, 2), move(Link.D2H, 3), compute(4)], UNIT)
    assert timeline.start == (0.0, 0.0, 0.0)
    assert timeline.seconds == 4


def test_an_instruction_waits_for_the_last_of_those_that_it_comes_after() -> None:
    plan = [move(Link.H2D, 2), move(Link.D2H, 5), compute(1, 0, 1)]
    assert predict(plan, UNIT).start[2] == 5


def test_a_pipeline_takes_as_long_as_its_slowest_link() -> None:
    # Reads of 3, compute of 2: n reads, and the last compute sticks out.
    plan, count = [], 5
    for k in range(count):
        plan += [move(Link.NVME_READ, 3), compute(2, 2 * k)]
    assert predict(plan, UNIT).seconds == 3 * count + 2


def test_updates_take_as_long_as_their_tier_writes_results() -> None:
    for tier, link in ((Tier.DEVICE, Link.DEVICE), (Tier.HOST, Link.HOST)):
        update = Instruction(Update(0, "s", tier), link, (), nbytes=10)
        expected = 10 / UNIT.update_bytes_per_second[tier]
        assert duration(update, UNIT) == expected


def test_every_instruction_but_a_free_has_an_overhead() -> None:
    rates = Rates(overhead_seconds=7.0)
    assert duration(move(Link.H2D, 0), rates) == 7.0
    free = Instruction(Free((), Tier.HOST), Link.FREE_AT_ONCE, ())
    assert duration(free, rates) == 0.0


def test_a_plan_of_nothing_takes_no_time() -> None:
    assert predict([], UNIT).seconds == 0


@pytest.mark.parametrize("rates", [Rates(), accelerator_rates()])
def test_rates_cover_every_link_and_tier(rates: Rates) -> None:
    moving = {Link.NVME_READ, Link.NVME_WRITE, Link.H2D, Link.D2H}
    assert rates.link_bytes_per_second.keys() == moving
    assert rates.update_bytes_per_second.keys() == {Tier.DEVICE, Tier.HOST}


def test_a_drive_that_was_measured_replaces_two_rates() -> None:
    links = UNIT.on_drive(3.0, 4.0).link_bytes_per_second
    assert links == UNIT.link_bytes_per_second | {
        Link.NVME_READ: 3.0,
        Link.NVME_WRITE: 4.0,
    }


def test_fixed_rates_are_those_of_two_cores_and_of_an_accelerator() -> None:
    """Every shipped plan and its golden tests go by them: a change shows here."""
    cores, accelerator = Rates(), accelerator_rates()
    links = Link.NVME_READ, Link.NVME_WRITE, Link.H2D, Link.D2H
    found = [
        [rates.link_bytes_per_second[link] for link in links]
        + [rates.update_bytes_per_second[tier] for tier in (Tier.HOST, Tier.DEVICE)]
        + [rates.flops_per_second, rates.exchange_bytes_per_second]
        for rates in (cores, accelerator)
    ]
    assert found[0] == [3e9, 3e9, 6e9, 6e9, 8e9, 3e9, 6e10, 2e9]
    assert found[1] == [5e9, 4e9, 25e9, 25e9, 30e9, 8e11, 4e14, 25e9]
    assert (cores.overhead_seconds, accelerator.overhead_seconds) == (2e-4, 5e-5)
