"""Which updates are left to the next step, and where their gradients wait."""

from dataclasses import replace

import pytest

from tests.toy.program import Layer, LeafCase, Toy, chain, make_toy
from zinf.plan import Run, StepOptions, Update
from zinf.plan.job import Job
from zinf.plan.pending import not_read_first, pending_copies
from zinf.plan.schedule import schedule, schedule_first, schedule_flush
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
LATE = StepOptions(1, False, DEVICE, HOST)


def jobs(
    toy: Toy, of=schedule, options: StepOptions = LATE, **homes: Tier
) -> list[Job]:
    """Of a step that leaves all updates to the next."""
    placed = toy.homes(homes.get("param", NVME), homes.get("state", NVME))
    units = toy.units(placed)
    options = replace(options, deferred=frozenset(range(len(units))))
    return of(toy.catalog(placed), units, options)


def uneven(num_layers: int) -> Toy:
    """A chain of layers with leaves of one, two and three rows in turn."""
    leaves = [LeafCase(f"w{i}", num_rows=1 + i % 3) for i in range(num_layers)]
    values = ["batch/x", *(f"layer{i}.0" for i in range(num_layers))]
    layers = [
        Layer(f"layer{i}", (ArrayId(Role.PARAM, f"w{i}"),), (before,), (after,))
        for i, (before, after) in enumerate(zip(values, values[1:], strict=False))
    ]
    return make_toy(leaves, layers)


def names(some: list[Job]) -> list[str]:
    """Of what is computed, in order."""
    kinds = (Run, Update)
    return [str(job.operation) for job in some if isinstance(job.operation, kinds)]


def test_what_the_first_segment_reads_is_known():
    toy = uneven(3)
    homes = toy.homes(NVME, NVME)
    units = toy.units(homes)
    found = not_read_first(units, toy.catalog(homes))
    paths = {x.master.path for number in found for x in units[number].arrays}
    assert paths == {"w1", "w2"}


def test_what_is_due_is_updated_just_before_it_is_read():
    order = names(jobs(chain(3)))
    assert order[:6] == [
        "pending update layer0",
        "forward layer0 @0",
        "pending update layer1",
        "forward layer1 @0",
        "pending update layer2",
        "loss layer2 @0",
    ]
    assert not any("pending update" in name for name in order[6:])


def test_the_first_step_and_the_flush_are_the_two_parts_of_a_step():
    toy = chain(3)

    def found(of) -> set[str]:
        return {str(job.operation) for job in jobs(toy, of)}

    assert found(schedule_first) | found(schedule_flush) == found(schedule)
    assert not any("pending update" in name for name in found(schedule_first))
    assert not any("forward" in name for name in found(schedule_flush))


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
    gradients = {ArrayId(Role.GRADIENT, f"layer{i}/w") for i in range(2)}
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
    assert {a.rows for a, _ in late.reads if a.role == Role.PARAM} == rows
    assert {a.rows for a, _ in late.writes if a.role == Role.PARAM} == {(0, 1), (1, 2)}
