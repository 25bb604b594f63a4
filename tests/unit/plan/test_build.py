"""From budgets to a checked plan: the fastest placement that fits."""

from collections.abc import Sequence
from functools import partial

import pytest

from tests.toy.program import LeafCase, Toy, chain
from zinf.plan import (
    Choices,
    InfeasibleError,
    Link,
    Pass,
    Plan,
    Rates,
    Resident,
    Run,
    StepOptions,
    Transfer,
    build,
    build_forward,
    build_placed,
    final_copies,
    fused_plan,
    initial_copies,
    value,
)
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
AMPLE = 1 << 30
NUM_LAYERS = 6
ROWS, NUMEL = 4, 64
MATRIX_BYTES = 4 * ROWS * NUMEL
STATE_BYTES = 3 * NUM_LAYERS * MATRIX_BYTES
LATE = StepOptions(1, False, DEVICE, HOST)
ALL = Choices(tuple(Tier), (HOST, NVME), 0)


def toy(value_numel: int = 32) -> Toy:
    leaf = LeafCase("w", ROWS, NUMEL)
    return chain(NUM_LAYERS, leaf=leaf, value_numel=value_numel)


def residents(program: Toy, tier: Tier | None = None) -> list[Resident]:
    moves = {"param": 3}
    return [
        Resident(array, spec.nbytes, tier, moves.get(array.role, 2))
        for array, spec in program.specs.items()
    ]


def placed(
    program: Toy | None = None,
    *,
    asked: Tier | None = None,
    choices: Choices = ALL,
    options: StepOptions = LATE,
    **budgets: int,
) -> Plan:
    program = program or toy()
    capacity = {tier: budgets.get(tier.value, AMPLE) for tier in Tier}
    return build_placed(
        program.catalog({}),
        residents(program, asked),
        program.units_for,
        capacity,
        options,
        choices,
    ).plan


def test_gradients_come_by_row_where_the_host_has_no_room_for_them() -> None:
    program = chain(2, leaf=LeafCase("w", 8, 32), block_rows=1, is_fine=True)
    matrix = 4 * 8 * 32
    options = StepOptions(1, True, DEVICE, HOST)
    # The whole parameter on its way to the device; not the gradient beside three rows.
    host = matrix + matrix // 8
    found = {}
    for by_row in (False, True):
        choices = Choices((DEVICE,), (HOST, NVME), 0, by_row=by_row)
        rest = {"choices": choices, "options": options, "host": host}
        found[by_row] = partial(placed, program, asked=NVME, **rest)
    with pytest.raises(InfeasibleError, match="host"):
        found[False]()
    plan = found[True]()
    assert plan.peak_bytes[HOST] <= host
    names = {str(x.operation) for x in plan.instructions}
    assert {f"offload gradient/layer0/w[{i}:{i + 1}]" for i in range(8)} <= names
    # With room they come as they did.
    choices = Choices((DEVICE,), (HOST, NVME), 0, by_row=True)
    ample = placed(program, asked=NVME, options=options, choices=choices)
    assert not any("gradient/layer0/w[" in str(x.operation) for x in ample.instructions)


def tiers_of(plan: Plan, kind: str) -> list[Tier]:
    homes = sorted(plan.homes.items(), key=lambda item: str(item[0]))
    return [tier for array, tier in homes if array.kind == kind]


def moved_to(plan: Plan, tier: Tier) -> set[str]:
    return {
        array.role
        for x in plan.instructions
        if isinstance(x.operation, Transfer) and x.operation.target == tier
        for array in x.operation.arrays
    }


def test_with_room_everything_rests_on_the_device() -> None:
    plan = placed()
    assert set(plan.homes.values()) == {DEVICE}
    assert plan.home_bytes == {DEVICE: STATE_BYTES, HOST: 0, NVME: 0}


def test_only_as_much_spills_as_must() -> None:
    device = placed().peak_bytes[DEVICE]
    for missing in (1, MATRIX_BYTES, 4 * MATRIX_BYTES):
        plan = placed(device=device - missing)
        assert plan.peak_bytes[DEVICE] <= device - missing
        spilled = plan.home_bytes[HOST]
        # Optimizer state goes first, and room for what then moves is kept free.
        assert 0 < spilled <= missing + 6 * MATRIX_BYTES
        assert set(tiers_of(plan, "param")) == {DEVICE}
        assert plan.home_bytes[NVME] == 0


def test_what_spills_last_is_what_a_step_moves_most() -> None:
    found = [placed(device=10_000 + 1000 * k) for k in range(10)]
    for plan in found:
        if DEVICE in tiers_of(plan, "state0"):
            assert set(tiers_of(plan, "param")) == {DEVICE}


def test_a_tier_that_was_asked_for_is_kept() -> None:
    plan = placed(asked=NVME)
    assert set(plan.homes.values()) == {NVME}
    with pytest.raises(InfeasibleError, match="memory.device"):
        placed(asked=DEVICE, device=STATE_BYTES - 1)


def test_values_wait_where_there_is_room() -> None:
    program = toy(value_numel=4096)
    values = (NUM_LAYERS - 1) * 4 * 4096
    room = 20 * MATRIX_BYTES + values
    on_device = placed(program, asked=NVME, device=room, host=room)
    on_host = placed(program, asked=NVME, device=room - values // 2, host=room)
    assert "value" not in moved_to(on_device, NVME)
    offloads = [
        x
        for x in on_host.instructions
        if str(x.operation).startswith("offload value/l")
    ]
    assert len(offloads) == NUM_LAYERS - 1
    on_nvme = placed(
        program, asked=NVME, device=room - values // 2, host=room - values // 2
    )
    assert "value" in moved_to(on_nvme, NVME)


def test_gradients_wait_on_nvme_only_when_the_host_has_no_room() -> None:
    with pytest.raises(InfeasibleError) as caught:
        placed(asked=NVME, host=1, choices=Choices((DEVICE,), (HOST,), 0))
    host = caught.value.shortages[HOST].needed_bytes
    assert "gradient" not in moved_to(placed(asked=NVME, host=host), NVME)
    assert "gradient" in moved_to(placed(asked=NVME, host=host - 1), NVME)


def test_small_arrays_stay_off_nvme() -> None:
    everything = Choices((DEVICE,), (HOST,), MATRIX_BYTES + 1)
    plan = placed(asked=NVME, choices=everything)
    assert set(plan.homes.values()) == {HOST}


BUDGETS = [
    {"device": 1},
    {"host": 1},
    {"nvme": 1},
    {"device": 1, "host": 1},
    {"device": 4000, "host": 4000, "nvme": 4000},
]


@pytest.mark.parametrize("asked", [None, NVME])
@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
def test_the_budgets_of_the_error_will_do(
    budgets: dict[str, int], asked: Tier | None
) -> None:
    if budgets == {"nvme": 1} and asked is None:
        assert set(placed(**budgets).homes.values()) == {DEVICE}
        return
    with pytest.raises(InfeasibleError) as caught:
        placed(asked=asked, **budgets)
    needed = {t.value: s.needed_bytes for t, s in caught.value.shortages.items()}
    plan = placed(asked=asked, **{**budgets, **needed})
    assert all(plan.peak_bytes[Tier(t)] <= n for t, n in needed.items())


def test_the_error_is_of_the_arrangement_that_misses_least() -> None:
    with pytest.raises(InfeasibleError) as caught:
        placed(asked=NVME, nvme=1)
    # Not of the one in which values and gradients wait there too.
    assert caught.value.missing_bytes == (0, 0, STATE_BYTES - 1)


def test_fixed_homes_are_kept_for_another_batch() -> None:
    program = toy()
    homes = program.homes(HOST, NVME)
    capacity = dict.fromkeys(Tier, AMPLE)
    plan = build(program.catalog(homes), program.units(homes), capacity, LATE)
    assert plan.homes == homes
    with pytest.raises(InfeasibleError) as caught:
        small = {**capacity, DEVICE: 100}
        build(program.catalog(homes), program.units(homes), small, LATE)
    needed = caught.value.shortages[DEVICE].needed_bytes
    enough = {**capacity, DEVICE: needed}
    build(program.catalog(homes), program.units(homes), enough, LATE)


def evaluation(plan: Plan, program: Toy) -> Plan:
    catalog = program.catalog(plan.homes)
    return build_forward(catalog, plan.capacity_bytes, num_microbatches=1)


def test_an_evaluation_only_runs_forward_and_leaves_arrays_at_home() -> None:
    program = toy()
    training = placed(program, asked=NVME)
    plan = evaluation(training, program)
    passes = {
        x.operation.kind for x in plan.instructions if isinstance(x.operation, Run)
    }
    assert passes == {Pass.FORWARD}
    assert plan.homes == training.homes
    assert plan.link_bytes(Link.NVME_WRITE) == 0
    assert plan.link_bytes(Link.NVME_READ) == NUM_LAYERS * MATRIX_BYTES


def test_an_evaluation_fits_wherever_training_does() -> None:
    program = toy()
    with pytest.raises(InfeasibleError) as caught:
        placed(program, asked=NVME, device=1, host=1)
    needed = {t.value: s.needed_bytes for t, s in caught.value.shortages.items()}
    training = placed(program, asked=NVME, **needed)
    plan = evaluation(training, program)
    assert all(plan.peak_bytes[t] <= training.capacity_bytes[t] for t in Tier)


def test_a_step_starts_with_the_batch_and_ends_with_its_results() -> None:
    program = chain(1, batch=("batch/x", "key"), num_aux=1).program
    options = StepOptions(2, False, DEVICE, HOST)
    assert initial_copies(program, options.num_microbatches) == [
        (value("batch/x", 0), HOST),
        (value("key", 0), DEVICE),
        (value("batch/x", 1), HOST),
        (value("key", 1), DEVICE),
    ]
    assert final_copies(program, options) == [
        (value(name, m), HOST) for m in range(2) for name in ("out/0", "out/1")
    ]


def fused(device: int) -> Plan:
    homes = {ArrayId(Role.PARAM, "w"): DEVICE}
    capacity = {**dict.fromkeys(Tier, AMPLE), DEVICE: device}
    return fused_plan(homes, 600, 400, capacity, 1000, Rates())


def test_the_fused_plan_is_one_instruction() -> None:
    plan = fused(1000)
    assert plan.is_fused and len(plan.instructions) == 1
    assert plan.tiers == {DEVICE}
    assert plan.home_bytes[DEVICE] == 600
    assert plan.peak_bytes[DEVICE] == 1000
    assert all(plan.link_bytes(link) == 0 for link in Link)


def test_a_fused_step_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(InfeasibleError) as caught:
        fused(999)
    assert caught.value.shortages[DEVICE].needed_bytes == 1000


def test_streamed_plans_are_not_fused() -> None:
    plan = placed(asked=NVME)
    found: Sequence[object] = plan.instructions
    assert not plan.is_fused and len(found) > 1
    assert plan.tiers == set(Tier)
