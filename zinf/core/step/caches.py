"""The caches of a program, and where they rest: leaf by leaf, fastest tiers first."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from zinf.core.plan import Catalog, InfeasibleError, cache, show_bytes
from zinf.core.program import Role, Tier
from zinf.core.step.shrink import SPARE

Rooms = Mapping[Tier, int]
"""The most bytes of caches on each tier where they may rest, fastest first. The slowest
takes what the others have no room for."""
Tiers = Mapping[str, Tier]
"""The tier where each cache rests, by name."""


@dataclass(frozen=True)
class Cached:
    """The leaves of a batch that a program may keep as caches, and where.

    Attributes:
        outputs: for each leaf by its name ("batch/..."), the position among the
            flattened outputs of what takes its place in the next run.
        rooms: for caches that have no tier yet.
        tiers: where all caches rest; None: by `rooms`.
        num_microbatches: those whose caches rest; None: those that run.
    """

    outputs: Mapping[str, int] = field(default_factory=dict)
    rooms: Rooms = field(default_factory=dict)
    tiers: Tiers | None = None
    num_microbatches: int | None = None


@dataclass(frozen=True)
class CacheSizes:
    """The bytes of the caches of some microbatches.

    Attributes:
        catalog: of the program, whose caches may be at home on any tiers.
    """

    catalog: Catalog
    num_microbatches: int

    def nbytes(self, name: str, tier: Tier) -> int:
        return self.num_microbatches * self.catalog.nbytes(cache(name, 0), tier)

    def used(self, tiers: Tiers) -> Counter[Tier]:
        """Bytes of caches on each tier."""
        found = Counter[Tier]()
        for name, tier in tiers.items():
            found[tier] += self.nbytes(name, tier)
        return found

    def rooms_left(self, rooms: Rooms, capacity_bytes: Mapping[Tier, int]) -> Rooms:
        """What arrays at rest leave of the rooms."""
        taken = Counter[Tier]()
        for array, tier in self.catalog.homes.items():
            if array.role != Role.CACHE:
                taken[tier] += self.catalog.nbytes(array, tier)
        return {t: min(room, capacity_bytes[t] - taken[t]) for t, room in rooms.items()}

    def placed(self, rooms: Rooms) -> Tiers:
        """The caches of the first layers on the fastest tiers."""
        left, found, used = list(rooms), {}, Counter[Tier]()
        for name in sorted(self.catalog.program.caches, key=_by_number):
            while len(left) > 1:
                needed = used[left[0]] + self.nbytes(name, left[0])
                if needed <= rooms[left[0]]:
                    break
                left.pop(0)
            found[name] = left[0]
            used[left[0]] += self.nbytes(name, left[0])
        return found

    def smaller(
        self, rooms: Rooms, tiers: Tiers, error: InfeasibleError
    ) -> Rooms | None:
        """Rooms for fewer bytes on tiers that lack some; None if no cache can go.

        Args:
            tiers: of the caches in the plan that `error` refuses.
        """
        used = self.used(tiers)
        lacking = {
            tier: max(0, used[tier] - max(short.missing_bytes, used[tier] // SPARE))
            for tier, short in error.shortages.items()
            if tier in list(rooms)[:-1] and used[tier]
        }
        return {**rooms, **lacking} if lacking else None

    def rooms_beside(self, rooms: Rooms, tiers: Tiers) -> Rooms:
        """For another program with these caches: no more on the tiers that are full."""
        used = self.used(tiers)
        full = [tier for tier in rooms if tier.order < max(t.order for t in used)]
        return {**rooms, **{tier: used[tier] for tier in full}}

    def refusal(self, rooms: Rooms, error: InfeasibleError) -> InfeasibleError:
        """The error of a program whose caches no tier holds, which says so."""
        if not rooms or list(rooms)[-1] not in error.shortages:
            return error
        nbytes = sum(self.nbytes(x, Tier.HOST) for x in self.catalog.program.caches)
        tiers = " and ".join(map(str, rooms))
        return error.because(
            [
                f"The caches take {show_bytes(nbytes)}, and {tiers} together have no "
                "room for them: give fewer or shorter sequences."
            ]
        )


def _by_number(name: str) -> list[int | str]:
    """A key that sorts names as their numbers count: "layers/2" before "layers/10"."""
    parts = re.split(r"(\d+)", name)
    return [int(x) if x.isdecimal() else x for x in parts]
