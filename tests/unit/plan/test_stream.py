"""Transfers and frees between the jobs: early, never twice, and within the budgets."""

from collections import Counter

import pytest

from tests.toy.program import LeafCase, Toy, chain
from zinf.plan import (
    Free,
    InfeasibleError,
    Link,
    Plan,
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
STATE_BYTES = 3 * NUM_LAYERS * MATRIX_BYTES
VALUE_BYTES = 4 * 32
WORKSPACE_BYTES = 40  # of a forward pass and of an update; of a backward pass, twice


def plan_of(program: Toy | None = None, *, home: Tier = NVME, **budgets: int) -> Plan:
    program = program or chain(NUM_LAYERS, leaf=LeafCase("w", ROWS, NUMEL))
    homes = program.homes(home, home)
    capacity = {t: budgets.get(t.value, AMPLE) for t in Tier}
    options = StepOptions(1, True, DEVICE, HOST)
    return build(program.catalog(homes), program.units(homes), capacity, options)


def needed(program: Toy | None = None, **budgets: int) -> dict[str, int]:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(program, **budgets)
    return {t.value: s.needed_bytes for t, s in caught.value.shortages.items()}


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


def first_fetch(plan: Plan, layer: int, target: Tier) -> int:
    copy = ArrayId(Role.PARAM, f"layer{layer}/w"), target
    return next(i for i, x in enumerate(plan.instructions) if copy in x.writes)


def test_with_room_every_array_is_read_once_a_step() -> None:
    plan = plan_of()
    assert set(fetched(plan, HOST).values()) == {1}
    assert plan.link_bytes(Link.NVME_READ) == STATE_BYTES
    assert plan.link_bytes(Link.NVME_WRITE) == STATE_BYTES
    # Parameters go to the device once, where they stay until their backward pass.
    assert set(fetched(plan, DEVICE).values()) == {1}


def test_what_is_at_home_on_the_device_is_never_moved() -> None:
    plan = plan_of(home=DEVICE)
    # The batch, up, and the loss and the norms, down.
    assert plan.link_bytes(Link.H2D) == VALUE_BYTES
    assert plan.link_bytes(Link.D2H) == 4 * (NUM_LAYERS + 1)
    assert plan.link_bytes(Link.NVME_READ) == plan.link_bytes(Link.NVME_WRITE) == 0


def test_parameters_are_fetched_three_jobs_ahead() -> None:
    plan = plan_of()
    for layer in range(1, NUM_LAYERS - 1):
        runs = position(plan, f"forward layer{layer - 1} @0")
        on_host, on_device = (first_fetch(plan, layer, t) for t in (HOST, DEVICE))
        assert on_host < on_device < runs
    # Not more at once, although all of it would fit: it would take the links from what
    # is needed first, and the room from nobody knows whom.
    starts = [position(plan, f"forward layer{k} @0") for k in (0, 1)]
    assert first_fetch(plan, 3, HOST) < starts[0] < first_fetch(plan, 4, HOST)
    assert first_fetch(plan, 6, HOST) < starts[1] < first_fetch(plan, 7, HOST)


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
def test_what_is_fetched_early_stays_until_it_is_used(tier: Tier) -> None:
    least = needed(**{tier.value: 1})[tier.value]
    more = plan_of().peak_bytes[tier] - least
    for tenths in range(11):
        size = least + more * tenths // 10
        assert unused(plan_of(**{tier.value: size})) == [], size


def test_the_least_the_device_needs_is_one_backward_pass() -> None:
    values = (NUM_LAYERS - 1) * VALUE_BYTES
    # The deepest backward pass on values: all that wait, a layer and its gradient, the
    # cotangents of its output and its input, and workspace.
    least = values + 2 * MATRIX_BYTES + 2 * WORKSPACE_BYTES + 2 * VALUE_BYTES
    found = needed(device=1)["device"]
    assert least - 2 * VALUE_BYTES <= found <= least + 2 * VALUE_BYTES


def test_the_least_the_host_needs_is_one_update() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(host=1)
    short = caught.value.shortages[HOST]
    assert short.what.startswith("`update layer")
    # Parameter, two moments, gradient, and workspace; losses and norms beside.
    least = 4 * MATRIX_BYTES + WORKSPACE_BYTES
    assert least <= short.needed_bytes <= least + VALUE_BYTES + 4 * (NUM_LAYERS + 1)


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_less_room_never_means_less_traffic(tier: Tier) -> None:
    # With room there, the host has from the device what it dropped itself.
    device = {} if tier == DEVICE else needed(device=1)
    least = needed(**{**device, tier.value: 1})[tier.value]
    most = plan_of(**device).peak_bytes[tier]
    link = {DEVICE: Link.H2D, HOST: Link.NVME_READ}[tier]
    sizes = [least + (most - least) * k // 4 for k in range(5)]
    plans = [plan_of(**{**device, tier.value: n}) for n in sizes]
    moved = [plan.link_bytes(link) for plan in plans]
    assert moved[0] > moved[-1]
    assert moved[-1] == min(moved) and moved[0] == max(moved)
    if tier == DEVICE:
        # The first layers wait longest for their backward pass, and are read again.
        again = {a.path for a, n in fetched(plans[1], DEVICE).items() if n > 1}
        assert again == {f"layer{i}/w" for i in range(len(again))} != set()


def test_the_host_has_from_the_device_what_it_dropped_itself() -> None:
    host = needed(host=1)
    roomy, tight = plan_of(**host), plan_of(**host, **needed(device=1))
    assert roomy.link_bytes(Link.NVME_READ) < tight.link_bytes(Link.NVME_READ)
    assert roomy.link_bytes(Link.D2H) > tight.link_bytes(Link.D2H)


@pytest.mark.parametrize("block_rows", [1, 2])
def test_a_whole_gives_its_rows_or_makes_way_for_them(block_rows: int) -> None:
    program = chain(NUM_LAYERS, leaf=LeafCase("w", ROWS, NUMEL), block_rows=block_rows)

    def rows(plan: Plan) -> set[ArrayId]:
        return {a for a in fetched(plan, HOST) if a.rows and a.role == Role.PARAM}

    ample = plan_of(program)
    assert not rows(ample)
    assert ample.link_bytes(Link.NVME_READ) == STATE_BYTES
    least = needed(program, host=1)
    tight = plan_of(program, **least)
    assert tight.peak_bytes[HOST] <= least["host"]
    assert rows(tight)


def test_all_budgets_that_are_too_small_are_named_at_once() -> None:
    enough = needed(device=1, host=1, nvme=1)
    assert enough.keys() == {"device", "host", "nvme"}
    plan = plan_of(**enough)
    assert all(plan.peak_bytes[Tier(t)] <= n for t, n in enough.items())


def test_what_is_at_home_must_fit_before_anything_else() -> None:
    with pytest.raises(InfeasibleError, match="the state placed there needs") as caught:
        plan_of(nvme=STATE_BYTES - 1)
    assert caught.value.shortages[NVME].needed_bytes == STATE_BYTES
    plan_of(nvme=STATE_BYTES)
