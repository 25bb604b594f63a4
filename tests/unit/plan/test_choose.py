"""Of the arrangements that fit, the fastest; of equal ones, the plainest."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.toy.program import LeafCase, chain
from zinf.plan import (
    Arrangement,
    Choices,
    InfeasibleError,
    Keeping,
    Link,
    Pass,
    Rates,
    Resident,
    Run,
    StepOptions,
    UpdateUnit,
    build_at_home,
    build_placed,
)
from zinf.program import ArrayId, ArraySpec, Role, Tier

DEVICE, HOST, NVME = Tier
AMPLE = 1 << 30
NUM_LAYERS, KEPT_BYTES, MATRIX_BYTES = 8, 4000, 4000
TOY = chain(NUM_LAYERS, leaf=LeafCase("w", 4, MATRIX_BYTES // 16))
STATE_BYTES = 3 * NUM_LAYERS * MATRIX_BYTES  # parameters and two moments
# A matrix of 4,000 bytes takes a millisecond each way, its moments two more.
DRIVE = {Link.NVME_READ: 4e6, Link.NVME_WRITE: 4e6, Link.H2D: 1e9, Link.D2H: 1e9}
UPDATES = {HOST: 1e9, DEVICE: 1e9}
# A forward pass is of 100 operations: a tenth of a millisecond, 10 ms or a second.
FAST, SLOW, SLOWEST = (Rates(DRIVE, flops, UPDATES, 1e-6) for flops in (1e6, 1e4, 1e2))


@dataclass
class Keeper:
    """What the seven first segments can save, of these bytes each.

    Attributes:
        flops_again: what a segment computes again that saves less; None if it saves
            all.
        asked: the room that was offered, for each time that somebody asked.
    """

    nbytes: int = KEPT_BYTES
    flops_again: int | None = None
    asked: list[int] = field(default_factory=list)

    def __call__(self, room_bytes: int) -> dict[int, Keeping]:
        self.asked.append(room_bytes)
        residuals = (ArraySpec((self.nbytes // 4,), "f4", 4),)
        again = self.flops_again
        keeping = Keeping(residuals, (0, 0), again is not None, again or 0)
        return dict.fromkeys(range(NUM_LAYERS - 1), keeping)


def arranged(
    rates: Rates,
    *keepers: Keeper,
    host: int = AMPLE,
    device: int = AMPLE,
    waits: bool = False,
    microbatches: int = 1,
) -> Arrangement:
    """The step with all arrays at home on the drive."""
    homes = TOY.homes(NVME, NVME)
    catalog = TOY.catalog(homes, num_microbatches=microbatches)
    return build_at_home(
        replace(catalog, rates=rates),
        TOY.units_for,
        {DEVICE: device, HOST: host, NVME: AMPLE},
        StepOptions(microbatches, not waits, DEVICE, HOST),
        Choices((DEVICE,), (HOST,), 0, (DEVICE,), keepers or (Keeper(),), defers=True),
    )


def kinds(made: Arrangement) -> list[Pass]:
    runs = [i.operation for i in made.plan.instructions if isinstance(i.operation, Run)]
    return [run.kind for run in runs]


def kept(made: Arrangement) -> int:
    return kinds(made).count(Pass.KEPT)


def is_selective(made: Arrangement) -> set[bool]:
    return {x.is_selective for x in made.catalog.keeping.values()}


def test_what_the_processor_binds_is_left_as_plain_as_it_is() -> None:
    options = arranged(SLOWEST).options
    assert options.deferred == frozenset()
    assert options.update_tier == HOST


def test_residuals_are_kept_by_as_many_segments_as_there_is_room_for() -> None:
    keeper = Keeper()
    assert kept(arranged(SLOWEST, keeper)) == 7
    assert keeper.asked == [AMPLE]
    some = arranged(SLOWEST, device=24_000)
    # The last ones, whose residuals wait for the shortest time.
    assert [k for k in kinds(some) if k in (Pass.FORWARD, Pass.KEEPING)] == [
        *[Pass.FORWARD] * 4,
        *[Pass.KEEPING] * 3,
    ]
    # With a matrix and its gradient, as much as three segments keep.
    assert 5 * MATRIX_BYTES < some.plan.peak_bytes[DEVICE] <= 24_000
    assert kept(arranged(SLOWEST, device=28_000)) == 4


def test_each_microbatch_keeps_residuals_of_its_own() -> None:
    keeper = Keeper()
    made = arranged(SLOWEST, keeper, device=34_000, microbatches=2)
    assert keeper.asked == [17_000]
    assert kept(made) == 2 * made.options.num_kept == 4


def test_less_is_kept_by_more_segments_where_there_is_no_room_for_all() -> None:
    some = arranged(SLOWEST, device=24_000)
    more = arranged(SLOWEST, Keeper(), Keeper(400, 10), device=24_000)
    assert kept(more) == 7 > kept(some)
    assert more.plan.peak_bytes[DEVICE] <= 24_000
    assert more.plan.timeline.seconds < some.plan.timeline.seconds
    # A backward pass is twice a forward pass, and what it does again.
    runs = [i for i in more.plan.instructions if isinstance(i.operation, Run)]
    assert {i.flops for i in runs if i.operation.kind == Pass.KEPT} == {210}
    assert is_selective(more) == {True}


def test_less_is_not_kept_where_all_can_be_or_where_it_saves_nothing() -> None:
    less, useless = Keeper(400, 10), Keeper(400, 100)
    ample = arranged(SLOWEST, Keeper(), less)
    assert not less.asked, "nothing is left to gain"
    some = arranged(SLOWEST, Keeper(), useless, device=24_000)
    assert useless.asked
    assert is_selective(ample) == is_selective(some) == {False}
    assert kept(ample) == 7 > kept(some) > 0


def test_no_residuals_are_looked_for_where_they_gain_nothing() -> None:
    keeper = Keeper()
    assert kept(arranged(FAST)) == 0, "the drive binds"
    # Each instruction takes a second, on no link most of the time. The seven segments
    # that could save residuals compute 100 operations each.
    rates = replace(SLOWEST, overhead_seconds=1.0)
    made = arranged(replace(rates, flops_per_second=1e12), keeper)
    assert not keeper.asked
    # Computing again takes 2% of the step.
    rates = replace(rates, flops_per_second=700 / (0.02 * made.seconds))
    assert kept(arranged(rates, keeper))
    assert keeper.asked


@pytest.mark.parametrize("waits", [False, True])
def test_updates_are_left_to_the_next_step_where_the_drive_binds(waits: bool) -> None:
    made = arranged(FAST, waits=waits)
    assert made.options.deferred == set(range(NUM_LAYERS))
    assert made.first is not None and made.flush is not None
    assert {a.role for a, _ in made.pending} == {Role.GRADIENT}


def test_what_is_read_first_is_updated_in_time_where_that_has_to_wait() -> None:
    # The update of the first layer is the last.
    scarce = arranged(FAST, waits=True, host=48_000)
    assert scarce.options.deferred == set(range(NUM_LAYERS - 1))


def test_updates_go_to_the_device_where_the_host_is_too_slow_for_them() -> None:
    rates = replace(FAST, update_bytes_per_second={HOST: 1e5, DEVICE: 1e9})
    assert arranged(rates).options.update_tier == DEVICE


@dataclass
class Placed:
    """Steps whose arrays rest where they gain most.

    Attributes:
        keeps: whether segments can save residuals.
        attempts: arrays on the device, for each time that units were asked for.
    """

    rates: Rates
    keeps: bool = True
    attempts: list[int] = field(default_factory=list)

    def build(
        self,
        device: int,
        *,
        host: int = 6 * MATRIX_BYTES,
        nvme: int = AMPLE,
        asked: Tier | None = None,
    ) -> Arrangement:
        residents = [
            Resident(
                array,
                spec.nbytes,
                asked,
                3 if array.role == Role.PARAM else 2,
                segment=int(array.path[len("layer")]),
            )
            for array, spec in TOY.specs.items()
        ]
        return build_placed(
            replace(TOY.catalog({}), rates=self.rates),
            residents,
            self.units_for,
            {DEVICE: device, HOST: host, NVME: nvme},
            StepOptions(1, True, DEVICE, HOST),
            Choices((DEVICE,), (HOST,), 0, keepings=(Keeper(),) if self.keeps else ()),
        )

    def units_for(
        self, homes: Mapping[ArrayId, Tier], tier: Tier
    ) -> Sequence[UpdateUnit]:
        self.attempts.append(sum(tier == DEVICE for tier in homes.values()))
        return TOY.units_for(homes, tier)


def homes_of(made: Arrangement) -> Counter:
    return Counter(made.catalog.homes.values())


def test_where_computing_binds_residuals_are_kept_and_the_first_layers_rest() -> None:
    device = 12 * MATRIX_BYTES
    made = Placed(SLOW).build(device)
    lean = Placed(SLOW).build(device, asked=NVME)
    assert homes_of(lean).keys() == {NVME}
    assert made.options.num_kept == lean.options.num_kept > 0
    assert made.plan.timeline.seconds < lean.plan.timeline.seconds
    resting = {a.path for a, tier in made.catalog.homes.items() if tier != NVME}
    assert resting == {f"layer{i}/w" for i in range(len(resting))}, "the first layers"
    assert 0 < len(resting) < NUM_LAYERS
    for tier in Tier:
        assert made.plan.peak_bytes[tier] <= made.plan.capacity_bytes[tier]


def test_without_residuals_to_keep_or_with_a_slow_drive_memory_is_filled() -> None:
    device = 12 * MATRIX_BYTES
    for placed in (Placed(SLOW, keeps=False), Placed(FAST)):
        made = placed.build(device)
        assert made.options.num_kept == 0
        assert made.plan.home_bytes[DEVICE] > device // 2
        homes = made.catalog.homes
        at_drive = {a.role for a, tier in homes.items() if tier == NVME}
        assert at_drive == {Role.STATE}, "what moves most is fast"


def test_without_a_drive_state_waits_on_the_host() -> None:
    device = 14 * MATRIX_BYTES
    made = Placed(SLOW).build(device, host=AMPLE, nvme=0)
    filled = Placed(SLOW, keeps=False).build(device, host=AMPLE, nvme=0)
    assert made.options.num_kept == NUM_LAYERS - 1
    assert homes_of(made).keys() == {DEVICE, HOST}
    assert made.plan.home_bytes[HOST] > filled.plan.home_bytes[HOST]
    assert made.plan.timeline.seconds < filled.plan.timeline.seconds


def test_where_a_plan_is_long_no_other_placement_is_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = 14 * MATRIX_BYTES
    searched = Placed(SLOW).build(device)
    monkeypatch.setattr("zinf.plan.placed.MAX_INSTRUCTIONS", 8)
    made = Placed(SLOW).build(device)
    assert made.options.num_kept < searched.options.num_kept
    assert made.plan.home_bytes[DEVICE] > searched.plan.home_bytes[DEVICE]


def test_state_larger_than_all_tiers_is_refused_after_one_attempt() -> None:
    placed, device, host = Placed(FAST, keeps=False), 24_000, 24_000
    with pytest.raises(InfeasibleError) as caught:
        placed.build(device, host=host, nvme=STATE_BYTES - device - host - 1)
    assert len(placed.attempts) == 1
    needed = {t: short.needed_bytes for t, short in caught.value.shortages.items()}
    assert needed == {NVME: STATE_BYTES}
    placed.build(device, host=host, nvme=STATE_BYTES)


def test_placements_leave_more_and_more_room_until_one_fits() -> None:
    """Each is a sixteenth of a tier smaller at least: 16 of a tier leave it empty."""
    placed, device = Placed(FAST, keeps=False), STATE_BYTES + 1
    # All 24 arrays would fit, but no step beside them; one with all of them away does.
    made = placed.build(device, host=AMPLE)
    assert made.plan.home_bytes[DEVICE] > device // 2
    attempts = placed.attempts
    tried = attempts[: attempts.index(min(attempts)) + 1]
    assert tried == sorted(tried, reverse=True)
    assert 1 < len(set(attempts)) <= 17
