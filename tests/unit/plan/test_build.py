"""From budgets to a checked plan: the fastest placement that fits, and what it moves.

`golden/built.txt` has, for each scenario, what rests and moves where; its name says
why.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from tests.golden import Golden
from tests.toy.program import LeafCase, Toy, chain
from zinf.core.plan import (
    Choices,
    Free,
    InfeasibleError,
    Link,
    OffloadedStep,
    Plan,
    Rates,
    Resident,
    StepOptions,
    Transfer,
    build,
    build_forward,
    build_placed,
    final_copies,
    fused_plan,
    initial_copies,
    offloaded_plan,
    prove,
    value,
)
from zinf.core.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier
AMPLE = 1 << 30
NUM_LAYERS = 8
ROWS, NUMEL = 4, 64
MATRIX_BYTES = 4 * ROWS * NUMEL  # a parameter; so are its gradient and its two moments
STATE_BYTES = 3 * NUM_LAYERS * MATRIX_BYTES
IN_BACKWARD = StepOptions(1, True, DEVICE, HOST)
LATE = StepOptions(1, False, DEVICE, HOST)
ALL = Choices(tuple(Tier), (HOST, NVME), 0)
ONE = Choices((DEVICE,), (HOST,), 0)


def toy(value_numel: int = 32, **options: int) -> Toy:
    leaf = LeafCase("w", ROWS, NUMEL)
    return chain(NUM_LAYERS, leaf=leaf, value_numel=value_numel, **options)


def room(budgets: Mapping[str, int]) -> dict[Tier, int]:
    return {tier: budgets.get(tier.value, AMPLE) for tier in Tier}


def placed(
    program: Toy | None = None,
    *,
    asked: Tier | None = None,
    choices: Choices = ALL,
    options: StepOptions = LATE,
    **budgets: int,
) -> Plan:
    """Arrays rest where they were asked for, or else where there is room."""
    program = program or toy()
    residents = [
        Resident(array, spec.nbytes, asked, 3 if array.role == Role.PARAM else 2)
        for array, spec in program.specs.items()
    ]
    capacity, units_for = room(budgets), program.units_for
    catalog = program.catalog({})
    made = build_placed(catalog, residents, units_for, capacity, options, choices)
    prove(made)
    return made.plan


def at_home(program: Toy | None = None, *, home: Tier = NVME, **budgets: int) -> Plan:
    """All arrays rest in `home`, and updates run in the backward pass."""
    program = program or toy()
    homes = program.homes(home, home)
    catalog, units = program.catalog(homes), program.units(homes)
    return build(catalog, units, room(budgets), IN_BACKWARD)


def evaluated(program: Toy, num_microbatches: int = 1, **budgets: int) -> Plan:
    catalog = program.catalog(program.homes(NVME, NVME))
    capacity = room(budgets)
    return build_forward(catalog, capacity, num_microbatches=num_microbatches)


def needed(
    make: Callable[..., Plan], *arguments: Toy, **budgets: int
) -> dict[str, int]:
    with pytest.raises(InfeasibleError) as caught:
        make(*arguments, **budgets)
    return {t.value: s.needed_bytes for t, s in caught.value.shortages.items()}


def described(make: Callable[[], Plan]) -> str:
    """Bytes at rest, at most and by link, and how often which arrays move where."""
    try:
        plan = make()
    except InfeasibleError as error:
        return f"    {error}".replace("\n", "\n    ")
    links = {link: plan.link_bytes(link) for link in Link}
    moved = Counter(
        f"{'rows of ' * bool(array.rows)}{array.role} => {x.operation.target}"
        for x in plan.instructions
        if isinstance(x.operation, Transfer)
        for array in x.operation.arrays
    )
    assert all(plan.peak_bytes[t] <= plan.capacity_bytes[t] for t in Tier)
    return "\n".join(
        f"    {name}: {', '.join(f'{key} {n}' for key, n in counts.items() if n)}"
        for name, counts in (
            ("at rest", plan.home_bytes),
            ("peaks", plan.peak_bytes),
            ("bytes by link", links),
            ("moved", dict(sorted(moved.items()))),
        )
    )


WIDE, BY_ONE, BY_TWO = toy(4096), toy(block_rows=1), toy(block_rows=2)
FINE = chain(2, leaf=LeafCase("w", 8, 32), block_rows=1, is_fine=True)
WIDE_ROOM = (3 * NUM_LAYERS + 2) * MATRIX_BYTES + (NUM_LAYERS - 1) * 4 * 4096
WIDE_LESS = WIDE_ROOM - (NUM_LAYERS - 1) * 4 * 4096 // 2


def by_row(is_by_row: bool, **budgets: int) -> Callable[[], Plan]:
    choices = Choices((DEVICE,), (HOST, NVME), 0, by_row=is_by_row)
    given = {"asked": NVME, "options": IN_BACKWARD, "choices": choices}
    return lambda: placed(FINE, **given, **budgets)


# A whole parameter on its way to the device; not the gradient beside three rows.
FINE_HOST = 4 * 8 * 32 + 4 * 32
SCENARIOS: dict[str, Callable[[], Plan]] = {
    # All on the device, and only as much spills as must: optimizer state first.
    "ample": placed,
    "a byte less": lambda: placed(device=placed().peak_bytes[DEVICE] - 1),
    "four matrices less": lambda: placed(
        device=placed().peak_bytes[DEVICE] - 4 * MATRIX_BYTES
    ),
    "asked for nvme": lambda: placed(asked=NVME),
    "asked for the device": lambda: placed(asked=DEVICE, device=STATE_BYTES - 1),
    "all below the threshold": lambda: placed(
        asked=NVME, choices=Choices((DEVICE,), (HOST,), MATRIX_BYTES + 1)
    ),
    # Values wait where there is room.
    "values wait on the device": lambda: placed(
        WIDE, asked=NVME, device=WIDE_ROOM, host=WIDE_ROOM
    ),
    "values wait on the host": lambda: placed(
        WIDE, asked=NVME, device=WIDE_LESS, host=WIDE_ROOM
    ),
    "values wait on nvme": lambda: placed(
        WIDE, asked=NVME, device=WIDE_LESS, host=WIDE_LESS
    ),
    # Not the arrangement in which values and gradients wait on nvme too.
    "the one that misses least": lambda: placed(asked=NVME, nvme=1),
    "gradients come whole": by_row(False, host=FINE_HOST),
    "gradients come by row": by_row(True, host=FINE_HOST),
    "room for whole gradients": by_row(True),
    # The same with given homes; every array is read once a step.
    "at home on nvme": at_home,
    "at home on the device": lambda: at_home(home=DEVICE),
    "no room for what is at home": lambda: at_home(nvme=STATE_BYTES - 1),
    # The deepest backward pass, and one update, are the least.
    "no room on any": lambda: at_home(device=1, host=1, nvme=1),
    "the least of the device": lambda: at_home(**needed(at_home, device=1)),
    "the least of the host": lambda: at_home(**needed(at_home, host=1)),
    # Without room on the device the host reads again what it has dropped itself.
    "the least of both": lambda: at_home(**needed(at_home, device=1, host=1)),
    "two more on the device": lambda: at_home(
        device=needed(at_home, device=1)["device"] + 2 * MATRIX_BYTES
    ),
    # A whole gives its rows, or makes way for them.
    "blocks of two rows": lambda: at_home(BY_TWO),
    "the least of rows": lambda: at_home(BY_ONE, **needed(at_home, BY_ONE, host=1)),
    "the least of two rows": lambda: at_home(BY_TWO, **needed(at_home, BY_TWO, host=1)),
    # Evaluation only runs forward, and leaves arrays at home.
    "evaluation": lambda: evaluated(toy(1024), 2),
    # Without room for three values beside a matrix, one waits elsewhere.
    "tight evaluation": lambda: evaluated(
        toy(1024), 2, device=2 * 4096 + 2 * MATRIX_BYTES
    ),
    "no room for evaluation": lambda: evaluated(toy(1024), device=4096),
}


def test_what_rests_and_moves_where(golden: Golden) -> None:
    found = [f"{name}:\n{described(make)}" for name, make in SCENARIOS.items()]
    golden.check("built.txt", "\n".join(found))


def test_gradients_wait_on_the_host_down_to_the_last_byte() -> None:
    host = needed(lambda **given: placed(asked=NVME, choices=ONE, **given), host=1)

    def writes_gradients(nbytes: int) -> bool:
        plan = placed(asked=NVME, host=nbytes)
        moves = [x for x in plan.instructions if isinstance(x.operation, Transfer)]
        on_nvme = [x.operation.arrays for x in moves if x.operation.target == NVME]
        return any(array.role == Role.GRADIENT for some in on_nvme for array in some)

    assert not writes_gradients(host["host"])
    assert writes_gradients(host["host"] - 1)


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
    enough = needed(lambda **given: placed(asked=asked, **given), **budgets)
    plan = placed(asked=asked, **{**budgets, **enough})
    assert all(plan.peak_bytes[Tier(t)] <= n for t, n in enough.items())
    # Evaluation fits wherever training does.
    homes = toy().catalog(plan.homes)
    evaluation = build_forward(homes, plan.capacity_bytes, num_microbatches=1)
    assert all(evaluation.peak_bytes[t] <= plan.capacity_bytes[t] for t in Tier)


def test_a_step_starts_with_the_batch_and_ends_with_its_results() -> None:
    program = chain(1, batch=("batch/x", "key"), num_aux=1).program
    assert initial_copies(program, 2) == [
        (value(name, m), tier)
        for m in range(2)
        for name, tier in (("batch/x", HOST), ("key", DEVICE))
    ]
    assert final_copies(program, StepOptions(2, False, DEVICE, HOST)) == [
        (value(name, m), HOST) for m in range(2) for name in ("out/0", "out/1")
    ]


def one_program(is_fused: bool, **budgets: int) -> Plan:
    """600 bytes at rest, on the device or the host, and 400 more while it runs."""
    capacity = room(budgets)
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
    given = {"is_fused": is_fused, tier.value: 999}
    assert needed(one_program, **given) == {tier.value: 1000}


# Transfers between the jobs: early, never in vain, and fewer with more room.


def position(plan: Plan, words: str) -> int:
    return next(i for i, x in enumerate(plan.instructions) if str(x.operation) == words)


def first_fetch(plan: Plan, layer: int, target: Tier) -> int:
    copy = ArrayId(Role.PARAM, f"layer{layer}/w"), target
    return next(i for i, x in enumerate(plan.instructions) if copy in x.writes)


def test_parameters_are_fetched_three_jobs_ahead() -> None:
    plan = at_home()
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
    least = needed(at_home, **{tier.value: 1})[tier.value]
    more = at_home().peak_bytes[tier] - least
    for tenths in range(11):
        size = least + more * tenths // 10
        assert unused(at_home(**{tier.value: size})) == [], size


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_less_room_never_means_less_traffic(tier: Tier) -> None:
    # With room there, the host has from the device what it dropped itself.
    device = {} if tier == DEVICE else needed(at_home, device=1)
    least = needed(at_home, **{**device, tier.value: 1})[tier.value]
    most = at_home(**device).peak_bytes[tier]
    link = {DEVICE: Link.H2D, HOST: Link.NVME_READ}[tier]
    sizes = [least + (most - least) * k // 4 for k in range(5)]
    plans = [at_home(**{**device, tier.value: n}) for n in sizes]
    moved = [plan.link_bytes(link) for plan in plans]
    assert moved[-1] == min(moved) < max(moved) == moved[0]
    if tier == DEVICE:
        # The first layers wait longest for their backward pass, and are read again.
        count = Counter(c for x in plans[1].instructions for c in x.creates)
        again = {
            array.path
            for (array, tier), n in count.items()
            if n > 1 and tier == DEVICE and array.role == Role.PARAM
        }
        assert again == {f"layer{i}/w" for i in range(len(again))} != set()
