"""What rests on fast tiers, and what is kept there for a while instead."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.toy.program import LeafCase, chain
from zinf.plan import (
    Arrangement,
    Choices,
    InfeasibleError,
    Keeping,
    Link,
    Plan,
    Rates,
    Resident,
    StepOptions,
    build_placed,
    choose,
)
from zinf.plan.choose import UnitsFor
from zinf.plan.passage import streamed
from zinf.plan.place import may_rest
from zinf.program import ArrayId, ArraySpec, Role, Tier

DEVICE, HOST, NVME = Tier
NUM_LAYERS, NUMEL = 8, 1000
MATRIX_BYTES = 4 * NUMEL
KEPT_BYTES = 4000
TOY = chain(NUM_LAYERS, leaf=LeafCase("w", 4, NUMEL // 4))
# A matrix of 4,000 bytes takes a millisecond each way, its moments two more.
DRIVE = {Link.NVME_READ: 4e6, Link.NVME_WRITE: 4e6, Link.H2D: 1e9, Link.D2H: 1e9}
UPDATES = {HOST: 1e9, DEVICE: 1e9}
# A forward pass is of 100 operations, and takes 10 ms or a tenth of one.
SLOW, FAST = (Rates(DRIVE, flops, UPDATES, 1e-6) for flops in (1e4, 1e6))


def placed(
    rates: Rates,
    device: int,
    *,
    host: int = 6 * MATRIX_BYTES,
    nvme: int = 1 << 30,
    asked: Tier | None = None,
    keeps: bool = True,
    units_for: UnitsFor = TOY.units_for,
) -> Arrangement:
    """The step of a chain within these budgets."""

    def keeping(room_bytes: int) -> dict[int, Keeping]:
        residuals = (ArraySpec((KEPT_BYTES // 4,), "f4", 4),)
        return {k: Keeping(residuals, (0, 0)) for k in range(NUM_LAYERS - 1)}

    def segment(array: ArrayId) -> int:
        return int(array.path[len("layer")])

    residents = [
        Resident(
            a, s.nbytes, asked, 3 if a.role == Role.PARAM else 2, segment=segment(a)
        )
        for a, s in TOY.specs.items()
    ]
    keepings = (keeping,) if keeps else ()
    return build_placed(
        replace(TOY.catalog({}), rates=rates),
        residents,
        units_for,
        {DEVICE: device, HOST: host, NVME: nvme},
        StepOptions(1, True, DEVICE, HOST),
        Choices((DEVICE,), (HOST,), 0, keepings=keepings),
    )


def resting(made: Arrangement) -> Counter:
    """By layer, how many arrays rest above the drive."""
    homes = made.catalog.homes
    return Counter(a.path for a, tier in homes.items() if tier != NVME)


@pytest.mark.parametrize("num_matrices", [12, 14, 18])
def test_where_computing_binds_residuals_are_kept_and_what_rests_is_of_the_ends(
    num_matrices: int,
) -> None:
    device = num_matrices * MATRIX_BYTES
    made, lean = placed(SLOW, device), placed(SLOW, device, asked=NVME)
    assert made.options.num_kept == lean.options.num_kept > 0
    assert made.plan.timeline.seconds < lean.plan.timeline.seconds
    layers = {int(path[len("layer")]) for path in resting(made)}
    assert layers == set(range(len(layers))), "the first layers"
    assert 0 < len(layers) < NUM_LAYERS
    for tier in Tier:
        assert made.plan.peak_bytes[tier] <= made.plan.capacity_bytes[tier]


def test_without_residuals_to_keep_or_with_a_slow_drive_memory_is_filled() -> None:
    device = 12 * MATRIX_BYTES
    for made in (placed(SLOW, device, keeps=False), placed(FAST, device)):
        assert made.options.num_kept == 0
        assert made.plan.home_bytes[DEVICE] > device // 2
        homes = made.catalog.homes
        at_drive = [a for a, tier in homes.items() if tier == NVME]
        assert all(a.role != Role.PARAM for a in at_drive), "what moves most is fast"


def test_without_a_drive_state_waits_on_the_host() -> None:
    device = 14 * MATRIX_BYTES
    made = placed(SLOW, device, host=1 << 30, nvme=0)
    filled = placed(SLOW, device, host=1 << 30, nvme=0, keeps=False)
    assert made.options.num_kept == NUM_LAYERS - 1
    assert set(made.catalog.homes.values()) == {DEVICE, HOST}
    assert made.plan.home_bytes[HOST] > filled.plan.home_bytes[HOST]
    assert made.plan.timeline.seconds < filled.plan.timeline.seconds


def test_what_was_asked_for_stays_where_it_was_asked_for() -> None:
    made = placed(SLOW, 14 * MATRIX_BYTES, asked=NVME)
    assert set(made.catalog.homes.values()) == {NVME}


def test_where_a_plan_is_long_no_other_placement_is_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = 14 * MATRIX_BYTES
    searched = placed(SLOW, device)
    monkeypatch.setattr("zinf.plan.placed.MAX_INSTRUCTIONS", 8)
    made = placed(SLOW, device)
    assert made.options.num_kept < searched.options.num_kept
    assert made.plan.home_bytes[DEVICE] > searched.plan.home_bytes[DEVICE]


def test_state_larger_than_all_tiers_together_is_refused_after_one_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters and two moments are 3 matrices a layer."""
    attempts = []

    def plan(*arguments: Any) -> Plan:
        attempts.append(arguments)
        return streamed(*arguments)

    monkeypatch.setattr(choose, "streamed", plan)
    state = 3 * NUM_LAYERS * MATRIX_BYTES
    device, host = 6 * MATRIX_BYTES, 6 * MATRIX_BYTES
    budgets = {"host": host, "keeps": False}
    with pytest.raises(InfeasibleError) as caught:
        placed(FAST, device, nvme=state - device - host - 1, **budgets)
    assert len(attempts) == 1
    needed = {t: short.needed_bytes for t, short in caught.value.shortages.items()}
    assert needed == {NVME: state}
    made = placed(FAST, device, nvme=state, **budgets)
    assert made.plan.peak_bytes[NVME] <= state


def test_placements_leave_more_and_more_room_until_one_fits() -> None:
    """Each is a sixteenth of a tier smaller at least: 16 of a tier leave it empty."""
    asked: list[int] = []

    def units_for(homes: dict[ArrayId, Tier], tier: Tier) -> Any:
        asked.append(sum(tier == DEVICE for tier in homes.values()))
        return TOY.units_for(homes, tier)

    # All 24 arrays would fit, but no step beside them; one with all of them away does.
    device = 3 * NUM_LAYERS * MATRIX_BYTES + 1
    made = placed(FAST, device, host=1 << 30, keeps=False, units_for=units_for)
    assert made.plan.home_bytes[DEVICE] > device // 2
    tried = asked[: asked.index(min(asked)) + 1]
    assert tried == sorted(tried, reverse=True)
    assert 1 < len(set(asked)) <= 17


@pytest.mark.parametrize("ratio", [1, 4])
def test_whether_state_has_room_anywhere_counts_one_device_s_part(ratio: int) -> None:
    array = ArrayId(Role.PARAM, "w")
    resident = Resident(array, 400, None, 3, device_bytes=400 // ratio)
    room = {DEVICE: 50, HOST: 100, NVME: 300 - 50 * ratio}
    assert may_rest([resident], room)
    assert not may_rest([resident], {**room, NVME: room[NVME] - 1})
