"""The rule that keeps concurrent links within a budget. [Note: fences]

Let the instructions be a list, and count, at each allocation, every allocation listed
up to it and only the frees that it waits for. If that never exceeds the budget, no
execution does: at any moment let i be the last listed allocation that has started; all
that is held was allocated at or before i, less the frees that i waited for. So an
allocation waits for the shortest prefix of the frees listed before it that makes its
bytes fit; with room to spare it waits for none.

The limit is not the budget of a tier but the peak of the plan in list order, or a
multiple of what moves then, so that what the plan says is what is measured at most.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zinf.plan.instruction import Free, Instruction, Link
from zinf.program import Tier


@dataclass
class _TierFence:
    limit_bytes: int
    allocated_bytes: int
    peak_bytes: int
    freed_bytes: int = 0  # by the prefix that is waited for
    prefix: int = 0
    frees: list[tuple[int, int, Link]] = field(default_factory=list)
    last: dict[Link, int] = field(default_factory=dict)

    def admit(self, nbytes: int) -> Iterable[int]:
        self.allocated_bytes += nbytes
        while self.allocated_bytes - self.freed_bytes > self.limit_bytes:
            freed, index, link = self.frees[self.prefix]
            self.freed_bytes += freed
            self.last[link] = index
            self.prefix += 1
        held_bytes = self.allocated_bytes - self.freed_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        # Links run in order: the last free of each link in the prefix implies the rest.
        return self.last.values()


def add_fences(
    instructions: Sequence[Instruction],
    limit_bytes: Mapping[Tier, int],
    held_bytes: Mapping[Tier, int],
) -> tuple[tuple[Instruction, ...], dict[Tier, int]]:
    """The instructions, each allocation waiting for the frees that it needs.

    And the most that any execution of them holds on each tier.

    Args:
        limit_bytes: what no execution may exceed; at least the peak in list order.
        held_bytes: what each tier holds when the step starts.
    """
    held = held_bytes
    tiers = {t: _TierFence(limit_bytes[t], held[t], held[t]) for t in Tier}
    fenced = []
    for index, instruction in enumerate(instructions):
        needed: dict[Tier, int] = defaultdict(int)
        for tier, nbytes in (*instruction.allocates, *instruction.workspace):
            needed[tier] += nbytes
        after = set(instruction.after)
        for tier, nbytes in needed.items():
            after.update(tiers[tier].admit(nbytes))
        fenced.append(replace(instruction, after=tuple(sorted(after))))
        returned = list(instruction.workspace)
        if isinstance(instruction.operation, Free):
            returned.append((instruction.operation.tier, instruction.nbytes))
        for tier, nbytes in returned:
            tiers[tier].frees.append((nbytes, index, instruction.link))
    return tuple(fenced), {t: tiers[t].peak_bytes for t in Tier}
