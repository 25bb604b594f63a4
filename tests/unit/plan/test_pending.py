"""Which updates are left to the next step, and where their gradients wait."""

import pytest

from tests.toy.program import LeafCase, Toy, chain
from zinf.plan import Run, StepOptions, Update, UpdateUnit
from zinf.plan.job import Job
from zinf.plan.pending import deferred_units, pending_copies
from zinf.plan.schedule import schedule, schedule_first, schedule_flush
from zinf.program import ArrayId, Tier

DEVICE, HOST, NVME = Tier
UNITS = [UpdateUnit(str(i), HOST, (), 0) for i in range(20)]
LATE = StepOptions(1, False, DEVICE, HOST, deferred_share=1.0)


def jobs(
    toy: Toy, of=schedule, options: StepOptions = LATE, **homes: Tier
) -> list[Job]:
    placed = toy.homes(homes.get("param", NVME), homes.get("state", NVME))
    return of(toy.catalog(placed), toy.units(placed), options)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_units_are_left_in_proportion_and_evenly(share):
    found = sorted(deferred_units(UNITS, share))
    assert abs(len(found) - share * len(UNITS)) < 1
    gaps = {b - a for a, b in zip(found, found[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_unit_that_is_ready_last_and_needed_first_is_left_only_with_all_others():
    last = len(UNITS) - 1
    assert last not in deferred_units(UNITS, 0.99)
    assert last in deferred_units(UNITS, 1.0)


def test_what_is_due_is_updated_just_before_it_is_read():
    order = [
        str(job.operation)
        for job in jobs(chain(3))
        if isinstance(job.operation, (Run, Update))
    ]
    assert order[:6] == [
        "late update layer0",
        "forward layer0 @0",
        "late update layer1",
        "forward layer1 @0",
        "late update layer2",
        "loss layer2 @0",
    ]
    assert not any("late update" in name for name in order[6:])


def test_the_first_step_and_the_flush_are_the_two_parts_of_a_step():
    toy = chain(3)

    def names(of) -> set[str]:
        return {str(job.operation) for job in jobs(toy, of)}

    assert names(schedule_first) | names(schedule_flush) == names(schedule)
    assert not any("late update" in name for name in names(schedule_first))
    assert not any("forward" in name for name in names(schedule_flush))


def test_a_gradient_is_used_up_by_the_last_update_that_reads_it():
    toy = chain(1, leaf=LeafCase("w", num_rows=4), block_rows=1, is_fine=True)
    late = [j for j in jobs(toy) if isinstance(j.operation, Update)]
    assert [len(job.consumes) for job in late] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("param", "state", "tier"), [(DEVICE, DEVICE, DEVICE), (DEVICE, NVME, HOST)]
)
def test_gradients_wait_on_the_device_only_for_what_rests_there(param, state, tier):
    toy = chain(2)
    homes = toy.homes(param, state)
    catalog, units = toy.catalog(homes), toy.units(homes)
    found = pending_copies(units, range(len(units)), catalog, LATE)
    gradients = {ArrayId("gradient", f"layer{i}/w") for i in range(2)}
    assert set(found) == {(g, tier) for g in gradients}


@pytest.mark.parametrize(
    ("home", "rows"), [(NVME, {None}), (HOST, {None}), (DEVICE, {(0, 1), (1, 2)})]
)
def test_blocks_are_updated_inside_of_what_the_forward_pass_reads(home, rows):
    toy = chain(1, leaf=LeafCase("w", num_rows=2), block_rows=1)
    (late,) = [
        job
        for job in jobs(toy, param=home, state=NVME)
        if isinstance(job.operation, Update)
    ]
    assert {a.rows for a, _ in late.reads if a.role == "param"} == rows
    assert {a.rows for a, _ in late.writes if a.role == "param"} == {(0, 1), (1, 2)}
