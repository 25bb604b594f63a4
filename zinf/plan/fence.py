"""The rule that keeps concurrent links within a budget. [Note: fences]

Let the instructions be a list, and count, at each allocation, every allocation listed
up to it and only the frees that it waits for. If that never exceeds the budget, no
execution does: at any moment let i be the last listed allocation that has started; all
that is held was allocated at or before i, less the frees that i waited for. So an
allocation waits for the shortest prefix of the frees listed before it that makes its
bytes fit; with room to spare it waits for none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zinf.plan.instruction import Link
from zinf.program import Tier


@dataclass
class _TierFence:
    capacity_bytes: int
    allocated_bytes: int
    freed_bytes: int = 0  # by the prefix that is waited for
    prefix: int = 0
    frees: list[tuple[int, int, Link]] = field(default_factory=list)
    last: dict[Link, int] = field(default_factory=dict)

    def admit(self, nbytes: int) -> Iterable[int]:
        self.allocated_bytes += nbytes
        while self.allocated_bytes - self.freed_bytes > self.capacity_bytes:
            freed, index, link = self.frees[self.prefix]
            self.freed_bytes += freed
            self.last[link] = index
            self.prefix += 1
        # Links run in order: the last free of each link in the prefix implies the rest.
        return self.last.values()


class Fence:
    """Which frees each allocation of a plan has to wait for."""

    def __init__(self, capacity: Mapping[Tier, int], held: Mapping[Tier, int]):
        self._tiers = {tier: _TierFence(capacity[tier], held[tier]) for tier in Tier}

    def start(self, tier: Tier, nbytes: int) -> None:
        """Counts bytes that are held when the step starts."""
        assert not list(self._tiers[tier].admit(nbytes))

    def admit(
        self, allocates: Mapping[Tier, int], workspace: Iterable[tuple[Tier, int]]
    ) -> set[int]:
        """The instructions that an allocation of these bytes waits for."""
        total = dict(allocates)
        for tier, nbytes in workspace:
            total[tier] = total.get(tier, 0) + nbytes
        return {i for t, n in total.items() if n for i in self._tiers[t].admit(n)}

    def freed(self, tier: Tier, nbytes: int, index: int, link: Link) -> None:
        """Counts bytes that instruction `index` gives back when it completes."""
        self._tiers[tier].frees.append((nbytes, index, link))
