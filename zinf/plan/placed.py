"""Where arrays rest and how a step is arranged, together: what fits, the fastest.

What rests on a fast tier takes room from the residuals that a step keeps there for a
while. Which of the two gains more depends on what binds the step, so both are planned,
and the clock of `cost` decides. None of it changes a number.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zinf.plan.catalog import Catalog, StepOptions
from zinf.plan.choose import (
    MAX_INSTRUCTIONS,
    Arrangement,
    Choices,
    Homes,
    Search,
    UnitsFor,
    better_of,
)
from zinf.plan.place import Resident, may_rest, place
from zinf.program import Tier

# A tier gives up room for what moves through it in growing steps until the plan fits.
MAX_ATTEMPTS = 24
# What rests beside residuals fills the room for it to such a share of the tier.
ROOM_STEPS = 32


def build_placed(
    catalog: Catalog,
    residents: Sequence[Resident],
    units_for: UnitsFor,
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
    choices: Choices,
) -> Arrangement:
    """Places arrays and arranges the step so that the plan fits, fastest first.

    Fills the fastest tiers as far as the plainest step lets it, and arranges that. If
    then something is computed again, arranges the step with all on the slowest tier
    that is allowed, and lets rest faster what has room beside the residuals. Takes the
    faster of the two. Of more than `MAX_INSTRUCTIONS` the first is taken.

    Args:
        catalog: its homes are not used.
        units_for: the update units for a placement and an `update_tier`.

    Raises:
        InfeasibleError: even with everything on the slowest tier allowed; with the
            budgets of the arrangement that misses least, on the device to begin with.
    """
    # One attempt, with all on the slowest tier allowed, says which budgets would do.
    # For 70B parameters the others take minutes.
    is_fixed = all(resident.tier is not None for resident in residents)
    is_hopeless = not may_rest(residents, capacity_bytes)
    num_attempts = 1 if is_fixed or is_hopeless else MAX_ATTEMPTS

    def homes(reserve: Mapping[Tier, int]) -> Homes:
        return place(
            residents,
            {t: capacity_bytes[t] - reserve[t] for t in Tier},
            persistence_bytes=choices.persistence_bytes,
        )

    def placements(reserve: dict[Tier, int]) -> Iterator[Homes]:
        for attempt in range(1, 1 + num_attempts):
            if attempt == num_attempts:
                reserve.update(capacity_bytes)  # all on the slowest tier allowed
            yield homes(reserve)

    search = Search(catalog, units_for, capacity_bytes, options, choices)
    plain = search.plain(placements)
    filled = search.fastest(plain)
    on_host = {} if capacity_bytes[Tier.NVME] else {Tier.HOST: 0}
    slowest = homes({**capacity_bytes, **on_host})
    num_kept = filled.options.num_kept
    if slowest == plain.catalog.homes or num_kept == search.num_able:
        return filled
    if len(filled.plan.instructions) > MAX_INSTRUCTIONS:
        return filled
    spilled = search.attempt(replace(plain.catalog, homes=slowest), plain.options)
    spilled = spilled and search.fastest(spilled)
    if spilled is None or spilled.options.num_kept <= num_kept:
        return filled
    free = [resident for resident in residents if resident.tier is None]
    return better_of(filled, _with_room(search, spilled, free))


def _with_room(
    search: Search, arranged: Arrangement, residents: Sequence[Resident]
) -> Arrangement:
    """The same with what has room beside it on faster tiers, if that is faster.

    That of the first segments comes first: they are updated last, and where computing
    binds, links are waited for only as a step begins and as it ends. How much has room
    is found by bisection: it may be what the step has there in any case at the time
    when there is least.

    Args:
        residents: what may rest anywhere.
    """
    best = arranged
    rest = sorted(residents, key=lambda r: (r.segment, -r.moves))
    for tier in (Tier.DEVICE, Tier.HOST):
        homes = best.catalog.homes
        rest = [r for r in rest if homes[r.array] == Tier.NVME or tier == Tier.DEVICE]
        size = [0, *accumulate(r.bytes_on(tier) for r in rest)]
        capacity = search.capacity_bytes[tier]
        fits, too_many = 0, bisect_right(size, capacity)
        while size[too_many - 1] - size[fits] > capacity // ROOM_STEPS:
            count = (fits + too_many) // 2
            moved = dict.fromkeys((r.array for r in rest[:count]), tier)
            catalog = replace(arranged.catalog, homes={**homes, **moved})
            found = search.attempt(catalog, arranged.options)
            if found is None:
                too_many = count
            else:
                fits, best = count, min(best, found, key=_seconds)
    return best


def _seconds(arrangement: Arrangement) -> float:
    return arrangement.plan.timeline.seconds
