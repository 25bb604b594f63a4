"""From budgets to a checked plan: the fastest placement that fits."""

from functools import partial

import pytest

from tests.toy.program import LeafCase, Toy, chain
from zinf.plan import (
    Choices,
    InfeasibleError,
    Link,
    OffloadedStep,
    Pass,
    Plan,
    Rates,
    Resident,
    Run,
    StepOptions,
    Transfer,
    build_forward,
    build_placed,
    final_copies,
    fused_plan,
    initial_copies,
    offloaded_plan,
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


def placed(
    program: Toy | None = None,
    *,
    asked: Tier | None = None,
    choices: Choices = ALL,
    options: StepOptions = LATE,
    **budgets: int,
) -> Plan:
    program = program or toy()
    residents = [
        Resident(array, spec.nbytes, asked, 3 if array.role == Role.PARAM else 2)
        for array, spec in program.specs.items()
    ]
    return build_placed(
        program.catalog({}),
        residents,
        program.units_for,
        {tier: budgets.get(tier.value, AMPLE) for tier in Tier},
        options,
        choices,
    ).plan


def needed(error: InfeasibleError) -> dict[str, int]:
    return {t.value: s.needed_bytes for t, s in error.shortages.items()}


def moved_to(plan: Plan, tier: Tier) -> set[str]:
    return {
        array.role
        for x in plan.instructions
        if isinstance(x.operation, Transfer) and x.operation.target == tier
        for array in x.operation.arrays
    }


def test_gradients_come_by_row_where_the_host_has_no_room_for_them() -> None:
    program = chain(2, leaf=LeafCase("w", 8, 32), block_rows=1, is_fine=True)
    matrix = 4 * 8 * 32
    options = StepOptions(1, True, DEVICE, HOST)
    whole, by_row = (
        Choices((DEVICE,), (HOST, NVME), 0, by_row=by_row) for by_row in (False, True)
    )
    plan = partial(placed, program, asked=NVME, options=options)
    # The whole parameter on its way to the device; not the gradient beside three rows.
    host = matrix + matrix // 8
    with pytest.raises(InfeasibleError, match="host"):
        plan(choices=whole, host=host)
    tight, ample = plan(choices=by_row, host=host), plan(choices=by_row)
    assert tight.peak_bytes[HOST] <= host
    rows = {f"offload gradient/layer0/w[{i}:{i + 1}]" for i in range(8)}
    assert rows <= {str(x.operation) for x in tight.instructions}
    assert rows.isdisjoint(str(x.operation) for x in ample.instructions)


def test_with_room_everything_rests_on_the_device_and_only_as_much_spills_as_must() -> (
    None
):
    plan = placed()
    assert plan.home_bytes == {DEVICE: STATE_BYTES, HOST: 0, NVME: 0}
    for missing in (1, MATRIX_BYTES, 4 * MATRIX_BYTES):
        device = plan.peak_bytes[DEVICE] - missing
        less = placed(device=device)
        assert less.peak_bytes[DEVICE] <= device
        # Optimizer state goes first, and room for what then moves is kept free.
        assert 0 < less.home_bytes[HOST] <= missing + 6 * MATRIX_BYTES
        assert less.home_bytes[NVME] == 0
        homes = less.homes.items()
        assert all(tier == DEVICE for array, tier in homes if array.kind == "param")


def test_a_tier_that_was_asked_for_is_kept_but_for_small_arrays() -> None:
    assert set(placed(asked=NVME).homes.values()) == {NVME}
    with pytest.raises(InfeasibleError, match="memory.device"):
        placed(asked=DEVICE, device=STATE_BYTES - 1)
    everything = Choices((DEVICE,), (HOST,), MATRIX_BYTES + 1)
    assert set(placed(asked=NVME, choices=everything).homes.values()) == {HOST}


def test_values_and_gradients_wait_where_there_is_room() -> None:
    program = toy(value_numel=4096)
    values = (NUM_LAYERS - 1) * 4 * 4096
    room = 20 * MATRIX_BYTES + values
    less = room - values // 2
    on_device, on_host, on_nvme = (
        placed(program, asked=NVME, device=device, host=host)
        for device, host in ((room, room), (less, room), (less, less))
    )
    assert "value" not in moved_to(on_device, NVME) | moved_to(on_host, NVME)
    assert "value" in moved_to(on_nvme, NVME)
    moves = [
        str(x.operation).startswith("offload value/l") for x in on_host.instructions
    ]
    assert sum(moves) == NUM_LAYERS - 1
    with pytest.raises(InfeasibleError) as caught:
        placed(asked=NVME, host=1, choices=Choices((DEVICE,), (HOST,), 0))
    host = caught.value.shortages[HOST].needed_bytes
    assert "gradient" not in moved_to(placed(asked=NVME, host=host), NVME)
    assert "gradient" in moved_to(placed(asked=NVME, host=host - 1), NVME)


@pytest.mark.parametrize(
    ("asked", "budgets"),
    [
        (None, {"device": 1, "host": 1}),
        (NVME, {"device": 1}),
        (NVME, {"device": 4000, "host": 4000, "nvme": 4000}),
    ],
)
def test_the_budgets_of_the_error_will_do(
    asked: Tier | None, budgets: dict[str, int]
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        placed(asked=asked, **budgets)
    enough = needed(caught.value)
    plan = placed(asked=asked, **{**budgets, **enough})
    assert all(plan.peak_bytes[Tier(t)] <= n for t, n in enough.items())
    # Evaluation fits wherever training does.
    homes = toy().catalog(plan.homes)
    evaluation = build_forward(homes, plan.capacity_bytes, num_microbatches=1)
    assert all(evaluation.peak_bytes[t] <= plan.capacity_bytes[t] for t in Tier)


def test_the_error_is_of_the_arrangement_that_misses_least() -> None:
    with pytest.raises(InfeasibleError) as caught:
        placed(asked=NVME, nvme=1)
    # Not of the one in which values and gradients wait there too.
    assert caught.value.missing_bytes == (0, 0, STATE_BYTES - 1)
    assert set(placed(nvme=1).homes.values()) == {DEVICE}


def test_an_evaluation_only_runs_forward_and_leaves_arrays_at_home() -> None:
    program = toy(value_numel=1024)
    training = placed(program, asked=NVME)
    catalog = program.catalog(training.homes)

    def evaluation(**budgets: int) -> Plan:
        capacity = {t: budgets.get(t.value, AMPLE) for t in Tier}
        return build_forward(catalog, capacity, num_microbatches=2)

    plan = evaluation()
    runs = [x.operation for x in plan.instructions if isinstance(x.operation, Run)]
    assert {run.kind for run in runs} == {Pass.FORWARD}
    assert plan.homes == training.homes
    assert plan.link_bytes(Link.NVME_WRITE) == 0
    assert plan.link_bytes(Link.NVME_READ) == NUM_LAYERS * MATRIX_BYTES
    # Without room for three values beside a matrix, one waits elsewhere.
    tight = evaluation(device=2 * 4096 + 2 * MATRIX_BYTES)
    assert tight.link_bytes(Link.D2H) > plan.link_bytes(Link.D2H)
    with pytest.raises(InfeasibleError):
        evaluation(device=4096)


def test_a_step_starts_with_the_batch_and_ends_with_its_results() -> None:
    program = chain(1, batch=("batch/x", "key"), num_aux=1).program
    assert initial_copies(program, 2) == [
        (value("batch/x", 0), HOST),
        (value("key", 0), DEVICE),
        (value("batch/x", 1), HOST),
        (value("key", 1), DEVICE),
    ]
    assert final_copies(program, StepOptions(2, False, DEVICE, HOST)) == [
        (value(name, m), HOST) for m in range(2) for name in ("out/0", "out/1")
    ]


def one_program(is_fused: bool, **budgets: int) -> Plan:
    """600 bytes at rest, on the device or the host, and 400 more while it runs."""
    capacity = {tier: budgets.get(tier.value, AMPLE) for tier in Tier}
    homes = {ArrayId(Role.PARAM, "w"): DEVICE if is_fused else HOST}
    if is_fused:
        return fused_plan(homes, 600, 400, capacity, 1000, Rates())
    step, peak = OffloadedStep(10, 4), {DEVICE: 300, HOST: 1000}
    return offloaded_plan(homes, step, 600, peak, capacity, 1000, Rates())


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_plan_of_one_program_is_one_instruction(is_fused: bool) -> None:
    tier = DEVICE if is_fused else HOST
    plan = one_program(is_fused, **{tier.value: 1000})
    (instruction,) = plan.instructions
    said = "run the whole step" + ", state on the host" * (not is_fused)
    assert str(instruction.operation) == said
    assert (plan.is_fused, plan.is_offloaded) == (is_fused, not is_fused)
    assert plan.tiers == ({DEVICE} if is_fused else {DEVICE, HOST})
    assert (plan.home_bytes[tier], plan.peak_bytes[tier]) == (600, 1000)
    moved = [plan.link_bytes(link) for link in (Link.H2D, Link.D2H, Link.NVME_READ)]
    assert moved == ([0, 0, 0] if is_fused else [10, 4, 0])
    with pytest.raises(InfeasibleError) as caught:
        one_program(is_fused, **{tier.value: 999})
    assert needed(caught.value) == {tier.value: 1000}
