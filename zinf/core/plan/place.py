"""Chooses the homes of persistent arrays: the fastest tier that has room.

Arrays that a step moves more often come first: a step reads parameters twice and writes
them once; it reads and writes optimizer state once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zinf.core.program import ArrayId, Tier


@dataclass(frozen=True, slots=True)
class Resident:
    """A persistent array that needs a home.

    Attributes:
        nbytes: bytes of the process's share.
        tier: the tier that the user asked for; None for the fastest that has room.
        moves: how often a step moves the array if it rests away from where it is used.
        device_bytes: bytes of one device's part; None if they are `nbytes`.
        segment: the first segment that reads the array or, if it is optimizer state,
            its parameter.
    """

    array: ArrayId
    nbytes: int
    tier: Tier | None
    moves: int
    device_bytes: int | None = None
    segment: int = 0

    def bytes_on(self, tier: Tier) -> int:
        if tier == Tier.DEVICE and self.device_bytes is not None:
            return self.device_bytes
        return self.nbytes


def place(
    residents: Iterable[Resident],
    room_bytes: Mapping[Tier, int],
    *,
    persistence_bytes: int,
) -> dict[ArrayId, Tier]:
    """A home for every array.

    Args:
        room_bytes: bytes of each tier for arrays at rest.
        persistence_bytes: smaller arrays never go to files: an operation on a drive
            costs as much as reading some tens of kilobytes.

    Arrays with equal `moves` are placed in the given order, so the first layers of a
    model rest on the fastest tier. Arrays that fit nowhere go to the slowest tier; the
    plan then reports the missing bytes.
    """
    left = dict(room_bytes)
    homes: dict[ArrayId, Tier] = {}
    ordered = sorted(residents, key=lambda r: (r.tier is None, -r.moves))
    for resident in ordered:
        tier = _choose(resident, left, persistence_bytes)
        left[tier] -= resident.bytes_on(tier)
        homes[resident.array] = tier
    return homes


def may_rest(residents: Iterable[Resident], capacity_bytes: Mapping[Tier, int]) -> bool:
    """False if all tiers together are too small for what rests, however it is placed.

    One device holds a part of an array whose share on host or drive is larger: its
    budget counts by the largest such ratio.
    """
    residents = list(residents)
    ratios = (
        r.nbytes / r.bytes_on(Tier.DEVICE) for r in residents if r.bytes_on(Tier.DEVICE)
    )
    on_device = capacity_bytes[Tier.DEVICE] * max(ratios, default=1.0)
    elsewhere = sum(capacity_bytes[tier] for tier in Tier.DEVICE.slower)
    return sum(r.nbytes for r in residents) <= on_device + elsewhere


def _choose(
    resident: Resident, left: Mapping[Tier, int], persistence_bytes: int
) -> Tier:
    # An array without elements never goes to files, even if persistence_bytes is 0.
    is_small = resident.nbytes < max(1, persistence_bytes)
    if resident.tier is not None:
        is_kept = is_small and not resident.tier.row.is_memory
        return Tier.HOST if is_kept else resident.tier
    tiers = [t for t in Tier if t.row.is_memory or not is_small]
    for tier in tiers:
        if resident.bytes_on(tier) <= left[tier]:
            return tier
    return tiers[-1]
