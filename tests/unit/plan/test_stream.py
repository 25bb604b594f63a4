"""Transfers and frees between the jobs: early, never twice, and within the budgets."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.toy.program import LeafCase, Toy, chain
from zinf.plan import (
    Free,
    InfeasibleError,
    Instruction,
    Link,
    Plan,
    Run,
    StepOptions,
    Transfer,
    build,
)
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
AMPLE = 1 << 30
NUM_LAYERS = 8
ROWS, NUMEL = 4, 64
MATRIX_BYTES = 4 * ROWS * NUMEL  # a parameter; so are its gradient and its two moments
VALUE_BYTES = 4 * 32
WORKSPACE_BYTES = 40  # of a forward pass and of an update; of a backward pass, twice


def toy(**options: Any) -> Toy:
    return chain(NUM_LAYERS, leaf=LeafCase("w", ROWS, NUMEL), **options)


def plan_of(
    program: Toy | None = None,
    *,
    param: Tier = NVME,
    state: Tier = NVME,
    in_backward: bool = True,
    **budgets: int,
) -> Plan:
    program = program or toy()
    homes = program.homes(param, state)
    capacity: Mapping[Tier, int] = {t: budgets.get(t.value, AMPLE) for t in Tier}
    options = StepOptions(1, in_backward, DEVICE, HOST)
    return build(program.catalog(homes), program.units(homes), capacity, options)


def fetched(plan: Plan, target: Tier) -> Counter[ArrayId]:
    """How often each persistent array goes to a faster tier."""
    return Counter(
        array
        for x in plan.instructions
        if isinstance(x.operation, Transfer) and x.operation.target == target
        if str(x.operation).startswith("fetch")
        for array in x.operation.arrays
        if array.role != Role.VALUE
    )


def position(plan: Plan, words: str) -> int:
    return next(i for i, x in enumerate(plan.instructions) if str(x.operation) == words)


def first_fetch(plan: Plan, array: ArrayId, target: Tier) -> int:
    return next(
        i
        for i, x in enumerate(plan.instructions)
        if isinstance(x.operation, Transfer)
        and x.operation.target == target
        and array in x.operation.arrays
    )


def test_with_room_every_array_is_read_once_a_step() -> None:
    plan = plan_of()
    assert set(fetched(plan, HOST).values()) == {1}
    assert plan.link_bytes(Link.NVME_READ) == 3 * NUM_LAYERS * MATRIX_BYTES
    assert plan.link_bytes(Link.NVME_WRITE) == 3 * NUM_LAYERS * MATRIX_BYTES
    # Parameters go to the device once, where they stay until their backward pass.
    assert set(fetched(plan, DEVICE).values()) == {1}


def test_what_is_at_home_on_the_device_is_never_moved() -> None:
    plan = plan_of(param=DEVICE, state=DEVICE)
    x = 4 * 32  # the batch, up, and the loss and the norms, down
    norms = 4 * (NUM_LAYERS + 1)
    assert plan.link_bytes(Link.H2D) == x
    assert plan.link_bytes(Link.D2H) == norms
    assert plan.link_bytes(Link.NVME_READ) == plan.link_bytes(Link.NVME_WRITE) == 0


def test_parameters_are_fetched_before_the_segment_in_front_has_run() -> None:
    plan = plan_of()
    for layer in range(1, NUM_LAYERS - 1):
        array = ArrayId(Role.PARAM, f"layer{layer}/w")
        runs = position(plan, f"forward layer{layer - 1} @0")
        assert first_fetch(plan, array, HOST) < first_fetch(plan, array, DEVICE) < runs


def test_the_lookahead_is_bounded() -> None:
    # Not everything at once, although all of it would fit: it would take the links from
    # what is needed first, and the room from nobody knows whom.
    plan = plan_of()
    last = ArrayId(Role.PARAM, f"layer{NUM_LAYERS - 1}/w")
    assert first_fetch(plan, last, HOST) > position(plan, "forward layer0 @0")


def unused(plan: Plan) -> list[ArrayId]:
    """What was fetched and freed again before anybody read it."""
    waiting: set[tuple[ArrayId, Tier]] = set()
    found = []
    for x in plan.instructions:
        waiting -= {*x.reads, *((array.whole, tier) for array, tier in x.reads)}
        if isinstance(x.operation, Transfer):
            waiting |= set(x.writes) - {(a, plan.homes.get(a)) for a, _ in x.writes}
        if isinstance(x.operation, Free):
            gone = [(array, x.operation.tier) for array in x.operation.arrays]
            found += [array for array, tier in gone if (array, tier) in waiting]
    return found


@pytest.mark.parametrize("tier", [DEVICE, HOST])
@pytest.mark.parametrize("tenths", range(11))
def test_what_is_fetched_early_stays_until_it_is_used(tier: Tier, tenths: int) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(**{tier.value: 1})
    least = caught.value.shortages[tier].needed_bytes
    size = least + (plan_of().peak_bytes[tier] - least) * tenths // 10
    assert unused(plan_of(**{tier.value: size})) == []


def test_the_least_the_device_needs_is_one_backward_pass() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(device=1)
    values = (NUM_LAYERS - 1) * VALUE_BYTES
    # The deepest backward pass on values: all that wait, a layer and its gradient, the
    # cotangents of its output and its input, and workspace.
    least = values + 2 * MATRIX_BYTES + 2 * WORKSPACE_BYTES + 2 * VALUE_BYTES
    needed = caught.value.shortages[DEVICE].needed_bytes
    assert least - 2 * VALUE_BYTES <= needed <= least + 2 * VALUE_BYTES


def test_the_least_the_host_needs_is_one_update() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(host=1)
    short = caught.value.shortages[HOST]
    assert short.what.startswith("`update layer")
    # Parameter, two moments, gradient, and workspace; losses and norms beside.
    least = 4 * MATRIX_BYTES + WORKSPACE_BYTES
    assert least <= short.needed_bytes <= least + VALUE_BYTES + 4 * (NUM_LAYERS + 1)


@pytest.mark.parametrize("num_missing", range(1, 6))
def test_under_pressure_the_copy_that_is_needed_last_goes_first(
    num_missing: int,
) -> None:
    # The first layers wait longest for their backward pass. With room for all but n
    # layers, the first n (or one more: their gradients need room too) are read again.
    device = plan_of().peak_bytes[DEVICE] - num_missing * MATRIX_BYTES
    counts = fetched(plan_of(device=device), DEVICE)
    again = {array.path for array, n in counts.items() if n == 2}
    assert max(counts.values()) == 2
    assert again == {f"layer{i}/w" for i in range(len(again))}
    assert num_missing <= len(again) <= num_missing + 1


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_less_room_never_means_less_traffic(tier: Tier) -> None:
    # With room there, the host has from the device what it dropped itself.
    device = {} if tier == DEVICE else {"device": least_bytes(DEVICE)}
    least = least_bytes(tier, **device)
    most = plan_of(**device).peak_bytes[tier]
    link = {DEVICE: Link.H2D, HOST: Link.NVME_READ}[tier]
    sizes = [least + (most - least) * k // 4 for k in range(5)]
    plans = [plan_of(**{tier.value: size}, **device) for size in sizes]
    moved = [plan.link_bytes(link) for plan in plans]
    assert moved[0] > moved[-1]
    assert moved[-1] == min(moved) and moved[0] == max(moved)


def test_the_host_has_from_the_device_what_it_dropped_itself() -> None:
    host = least_bytes(HOST)
    roomy = plan_of(host=host)
    tight = plan_of(host=host, device=least_bytes(DEVICE))
    assert roomy.link_bytes(Link.NVME_READ) < tight.link_bytes(Link.NVME_READ)
    assert roomy.link_bytes(Link.D2H) > tight.link_bytes(Link.D2H)


def least_bytes(tier: Tier, **budgets: int) -> int:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(**budgets, **{tier.value: 1})
    return caught.value.shortages[tier].needed_bytes


def test_copies_go_as_soon_as_nobody_needs_them() -> None:
    plan = plan_of(in_backward=False)
    gradient = ArrayId(Role.GRADIENT, "layer3/w")
    freed = {
        (array, x.operation.tier): i
        for i, x in enumerate(plan.instructions)
        if isinstance(x.operation, Free)
        for array in x.operation.arrays
    }
    offload = next(
        i
        for i, x in enumerate(plan.instructions)
        if isinstance(x.operation, Transfer) and gradient in x.operation.arrays
    )
    assert freed[gradient, DEVICE] == offload + 1
    # Home is written first, for the copy to go.
    update = position(plan, "update layer3")
    assert update < freed[gradient, HOST] <= update + 2


def test_rows_are_taken_from_a_whole_that_is_on_the_host_already() -> None:
    plan = plan_of(toy(block_rows=2))
    assert not any(
        array.rows and array.role == Role.PARAM for array in fetched(plan, HOST)
    )
    reads = 3 * NUM_LAYERS * MATRIX_BYTES
    assert plan.link_bytes(Link.NVME_READ) == reads


def test_a_whole_makes_way_for_the_rows_that_are_needed_of_it() -> None:
    program = toy(block_rows=1)
    with pytest.raises(InfeasibleError) as caught:
        plan_of(program, host=1)
    least = caught.value.shortages[HOST].needed_bytes
    plan = plan_of(program, host=least)
    assert plan.peak_bytes[HOST] <= least
    assert any(array.rows and array.role == Role.PARAM for array in fetched(plan, HOST))


def test_all_budgets_that_are_too_small_are_named_at_once() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(device=1, host=1, nvme=1)
    needed = {t.value: s.needed_bytes for t, s in caught.value.shortages.items()}
    assert needed.keys() == {"device", "host", "nvme"}
    plan = plan_of(**needed)
    assert all(plan.peak_bytes[Tier(t)] <= n for t, n in needed.items())


def test_what_is_at_home_must_fit_before_anything_else() -> None:
    with pytest.raises(InfeasibleError, match="the state placed there needs") as caught:
        plan_of(nvme=3 * NUM_LAYERS * MATRIX_BYTES - 1)
    shortage = caught.value.shortages[NVME]
    assert shortage.needed_bytes == 3 * NUM_LAYERS * MATRIX_BYTES


def test_losses_stay_on_the_host_for_the_caller() -> None:
    plan = plan_of()
    loss = ArrayId(Role.VALUE, "out/0", None, 0)
    freed = [
        (array, x.operation.tier)
        for x in plan.instructions
        if isinstance(x.operation, Free)
        for array in x.operation.arrays
    ]
    assert (loss, DEVICE) in freed
    assert (loss, HOST) not in freed


def test_runs_are_the_jobs_in_their_order() -> None:
    def runs(instructions: tuple[Instruction, ...]) -> list[str]:
        return [str(x.operation) for x in instructions if isinstance(x.operation, Run)]

    assert runs(plan_of().instructions) == runs(plan_of(param=DEVICE).instructions)
