"""Of the arrangements that fit, the fastest; of equal ones, the plainest."""

from dataclasses import replace
from typing import Any

from tests.toy.program import LeafCase, chain
from zinf.plan import (
    Arrangement,
    Choices,
    Keeping,
    Link,
    Pass,
    Rates,
    Run,
    StepOptions,
    build_at_home,
    choose,
)
from zinf.program import ArraySpec, Tier

DEVICE, HOST, NVME = Tier
AMPLE = 1 << 30
KEPT_BYTES = 4000
TOY = chain(8, leaf=LeafCase("w", 4, 250))
# A matrix of 4,000 bytes takes a millisecond each way, its moments two more.
DRIVE = {Link.NVME_READ: 4e6, Link.NVME_WRITE: 4e6, Link.H2D: 1e9, Link.D2H: 1e9}
UPDATES = {HOST: 1e9, DEVICE: 1e9}
# A forward pass is of 100 operations.
FAST, SLOW = (Rates(DRIVE, flops, UPDATES, 1e-6) for flops in (1e6, 1e2))


def arranged(
    rates: Rates,
    *,
    host: int = AMPLE,
    device: int = AMPLE,
    waits: bool = False,
    selective: tuple[int, int] | None = None,
) -> Arrangement:
    """Args:
    selective: bytes that a segment may keep instead, and what it then has to do again.
    """

    def keeping(room_bytes: int) -> dict[int, Keeping]:
        asked.append(room_bytes)
        residuals = (ArraySpec((KEPT_BYTES // 4,), "f4", 4),)
        return {k: Keeping(residuals, (0, 0)) for k in range(7)}

    def keeping_less(room_bytes: int) -> dict[int, Keeping]:
        assert selective is not None
        asked.append(room_bytes)
        kept_bytes, flops = selective
        residuals = (ArraySpec((kept_bytes // 4,), "f4", 4),)
        return {k: Keeping(residuals, (0, 0), True, flops) for k in range(7)}

    asked: list[int] = []
    keepings = (keeping, keeping_less)[: 1 if selective is None else 2]
    homes = TOY.homes(NVME, NVME)
    made = build_at_home(
        replace(TOY.catalog(homes), rates=rates),
        TOY.units_for,
        {DEVICE: device, HOST: host, NVME: AMPLE},
        StepOptions(1, not waits, DEVICE, HOST),
        Choices(
            (DEVICE,),
            (HOST,),
            0,
            (DEVICE,),
            keepings,
            defers=True,
        ),
    )
    assert all(room == device for room in asked)
    if len(asked) == 1:
        assert not any(x.is_selective for x in made.catalog.keeping.values())
    return made


def kept(made: Arrangement) -> int:
    runs = [i.operation for i in made.plan.instructions if isinstance(i.operation, Run)]
    return sum(run.kind == Pass.KEPT for run in runs)


def test_what_the_processor_binds_is_left_as_plain_as_it_is() -> None:
    options = arranged(SLOW).options
    assert options.deferred == frozenset()
    assert options.update_tier == HOST


def test_residuals_are_kept_by_as_many_segments_as_there_is_room_for() -> None:
    assert kept(arranged(SLOW)) == 7
    some = arranged(SLOW, device=24_000)
    assert 0 < kept(some) < 7
    assert some.plan.peak_bytes[DEVICE] <= 24_000
    # The last ones, whose residuals wait for the shortest time.
    runs = [i.operation for i in some.plan.instructions if isinstance(i.operation, Run)]
    kinds = [run.kind for run in runs if run.kind in (Pass.FORWARD, Pass.KEEPING)]
    assert kinds == sorted(kinds, key=[Pass.FORWARD, Pass.KEEPING].index)


def test_no_plan_is_tried_whose_residuals_alone_have_no_room(monkeypatch) -> None:
    tried = []
    step = choose.step

    def note(*arguments: Any) -> Arrangement:
        tried.append(arguments[-1].num_kept * KEPT_BYTES)
        return step(*arguments)

    monkeypatch.setattr(choose, "step", note)
    assert kept(arranged(SLOW, device=24_000)) > 0
    assert 12_000 < max(tried) <= 24_000


def test_less_is_kept_by_more_segments_where_there_is_no_room_for_all() -> None:
    some = arranged(SLOW, device=24_000)
    more = arranged(SLOW, device=24_000, selective=(400, 10))
    assert kept(more) == 7 > kept(some)
    assert more.plan.peak_bytes[DEVICE] <= 24_000
    assert more.plan.timeline.seconds < some.plan.timeline.seconds
    # A backward pass is twice a forward pass, and what it does again.
    runs = [i for i in more.plan.instructions if isinstance(i.operation, Run)]
    assert {i.flops for i in runs if i.operation.kind == Pass.KEPT} == {210}
    assert all(x.is_selective for x in more.catalog.keeping.values())


def test_less_is_not_kept_where_all_can_be_or_where_it_costs_as_much_as_it_saves() -> (
    None
):
    ample = arranged(SLOW, selective=(400, 10))
    some = arranged(SLOW, device=24_000, selective=(400, 100))
    for made in (ample, some):
        assert not any(x.is_selective for x in made.catalog.keeping.values())
    assert kept(ample) == 7 > kept(some) > 0


def test_nothing_is_kept_where_the_drive_binds() -> None:
    assert kept(arranged(FAST)) == 0


def test_no_residuals_are_looked_for_where_computing_again_takes_no_time(
    monkeypatch,
) -> None:
    searches = []
    keeping_most = choose.Search.keeping_most

    def note(search: choose.Search, *arguments: Any) -> Arrangement | None:
        searches.append(arguments)
        return keeping_most(search, *arguments)

    monkeypatch.setattr(choose.Search, "keeping_most", note)
    # Each instruction takes a second, on no link most of the time. The seven segments
    # that could save residuals compute 100 operations each.
    rates = replace(SLOW, overhead_seconds=1.0)
    step_seconds = arranged(replace(rates, flops_per_second=1e12)).seconds
    assert not searches
    # Computing again takes 2% of the step.
    assert kept(arranged(replace(rates, flops_per_second=700 / (0.02 * step_seconds))))
    assert searches


def test_updates_are_left_to_the_next_step_where_the_drive_binds() -> None:
    for waits in (False, True):
        made = arranged(FAST, waits=waits)
        assert made.options.deferred
        assert made.first is not None and made.flush is not None
        assert made.pending


def test_what_is_read_first_is_not_left_to_the_next_step_where_that_has_to_wait() -> (
    None
):
    ample = arranged(FAST, waits=True)
    scarce = arranged(FAST, waits=True, host=48_000)
    assert ample.options.deferred == set(range(8))
    # The update of the first layer is the last.
    assert scarce.options.deferred == set(range(7))


def test_updates_go_to_the_device_where_the_host_is_too_slow_for_them() -> None:
    rates = replace(FAST, update_bytes_per_second={HOST: 1e5, DEVICE: 1e9})
    assert arranged(rates).options.update_tier == DEVICE
