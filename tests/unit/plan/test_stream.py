"""Transfers between the jobs: early, never in vain, and fewer with more room."""

from collections import Counter

import pytest

from tests.unit.plan.test_build import NUM_LAYERS, at_home, needed
from zinf.plan import Free, Link, Plan, Transfer
from zinf.program import ArrayId, Role, Tier

DEVICE, HOST, NVME = Tier


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
