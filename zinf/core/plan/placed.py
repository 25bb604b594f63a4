"""Chooses homes and arrangement together: the fastest step that fits.

Arrays that rest on the device leave less room for saved residuals. Which of the two
gains more depends on the link that binds the step, so both are planned and `cost`
predicts which is faster. No choice changes a result.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter

from zinf.core.plan.catalog import Catalog, StepOptions
from zinf.core.plan.choose import (
    Arrangement,
    Choices,
    Homes,
    Search,
    UnitsFor,
    faster,
    whole,
)
from zinf.core.plan.infeasible import InfeasibleError
from zinf.core.plan.place import Resident, may_rest, place
from zinf.core.program import Tier, open_tiers

# Building a longer plan takes seconds, and a second placement takes several plans.
MAX_INSTRUCTIONS = 4096
# Resolution of the search for resident bytes beside residuals: 1/32 of a tier.
ROOM_STEPS = 32


def build_placed(
    catalog: Catalog,
    residents: Sequence[Resident],
    units_for: UnitsFor,
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
    choices: Choices,
) -> Arrangement:
    """Places arrays and arranges the step so that the plan fits and is fast.

    The first candidate has the fastest tiers as full as `Search.plain` allows. If
    some segments recompute in it, a second candidate is built: it starts with all
    arrays on the slowest tier allowed, so more residuals fit, and then moves arrays to
    faster tiers where room is left. `cost` says which candidate is taken. Plans of more
    than `MAX_INSTRUCTIONS` have only the first.

    Args:
        catalog: its homes are not used.
        units_for: see `UnitsFor`.

    Raises:
        InfeasibleError: no plan fits, even with all arrays on the slowest tier allowed.
            The error names the budgets that suffice for the arrangement with the fewest
            missing bytes, counted on the device first.
    """
    # One attempt, with all on the slowest tier allowed, says which budgets would do.
    # For 70B parameters the others take minutes.
    is_fixed = all(resident.tier is not None for resident in residents)
    fits_at_rest = may_rest(residents, capacity_bytes)
    is_only_one = is_fixed or not fits_at_rest

    def homes(reserve: Mapping[Tier, int]) -> Homes:
        return place(
            residents,
            {t: capacity_bytes[t] - reserve[t] for t in Tier},
            persistence_bytes=choices.persistence_bytes,
        )

    def placements(reserve: dict[Tier, int]) -> Iterator[Homes]:
        if is_only_one:
            reserve.update(capacity_bytes)
        while True:
            yield homes(reserve)

    search = Search(catalog, units_for, capacity_bytes, options, choices)
    try:
        plain = search.plain(placements)
    except InfeasibleError as error:
        error.may_rest = fits_at_rest
        raise
    # Arrays that find no room go to the slowest of all tiers; this is of those open.
    slowest = homes({**capacity_bytes, open_tiers(capacity_bytes)[-1]: 0})
    free = [resident for resident in residents if resident.tier is None]
    return _fastest(search, plain, slowest, free)


def _fastest(
    search: Search,
    plain: Arrangement,
    slowest: Homes,
    residents: Sequence[Resident],
) -> Arrangement:
    """The fastest step with the homes of `plain`, or with `slowest` and what has room.

    Args:
        residents: arrays whose tier the user left open.
    """
    filled = search.fastest(plain)
    is_long = len(filled.plan.instructions) > MAX_INSTRUCTIONS
    if slowest == plain.catalog.homes or is_long:
        return filled
    if filled.options.num_kept == len(search.may_keep):
        return filled
    catalog = replace(plain.catalog, homes=slowest)
    spilled = search.attempt(replace(plain, catalog=catalog))
    if spilled is None:
        return filled
    return faster(filled, _with_room(search, search.fastest(spilled), residents))


def _with_room(
    search: Search, arranged: Arrangement, residents: Sequence[Resident]
) -> Arrangement:
    """The fastest arrangement with some arrays moved to faster tiers.

    Arrays of the first segments move first: they are read first and updated last, and
    if compute binds, the device waits for links only at the start and end of a step.
    Bisection finds how many arrays have room. It has to build plans for that: a
    resident array takes no extra bytes if the step holds a copy there at its peak.

    Args:
        residents: arrays whose tier the user left open.
    """
    best = arranged
    rest = sorted(residents, key=lambda r: (r.segment, -r.moves))
    for tier in tuple(Tier)[:-1]:
        homes = best.catalog.homes
        if tier != Tier.DEVICE:
            rest = [r for r in rest if homes[r.array] in tier.slower]
        size = [0, *accumulate(r.bytes_on(tier) for r in rest)]
        capacity = search.capacity_bytes[tier]
        fits, too_many = 0, bisect_right(size, capacity)
        while size[too_many - 1] - size[fits] > capacity // ROOM_STEPS:
            count = (fits + too_many) // 2
            moved = dict.fromkeys((r.array for r in rest[:count]), tier)
            catalog = replace(arranged.catalog, homes={**homes, **moved})
            found = search.attempt(replace(arranged, catalog=catalog))
            if found is None:
                too_many = count
            else:
                fits, best = count, min(best, found, key=attrgetter("seconds"))
    try:
        return whole(best)
    except InfeasibleError:
        return arranged
