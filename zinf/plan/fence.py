"""The rule that keeps concurrent links within a budget. [Note: fences]

Let the instructions be a list, and count, at each allocation, every allocation listed
up to it and only the frees that it waits for. If that never exceeds the budget, no
execution does: at any moment let i be the last listed allocation that has started; all
that is held was allocated at or before i, less the frees that i waited for. So an
allocation waits for as many of the frees listed before it as make its bytes fit, those
first that are predicted to be done first; with room to spare it waits for none.

The limit is not the budget of a tier but the peak of the plan in list order, or a
multiple of what moves then, so that what the plan says is what is measured at most.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from zinf.plan.cost import Clock, Rates
from zinf.plan.instruction import Free, Instruction, Link
from zinf.program import Tier


@dataclass
class _TierFence:
    limit_bytes: int
    allocated_bytes: int
    peak_bytes: int
    freed_bytes: int = 0  # by those that are waited for
    # The others: when they are predicted to be done, number, link and bytes.
    frees: list[tuple[float, int, Link, int]] = field(default_factory=list)
    last: dict[Link, int] = field(default_factory=dict)

    def admit(self, nbytes: int) -> Iterable[int]:
        self.allocated_bytes += nbytes
        while self.allocated_bytes - self.freed_bytes > self.limit_bytes:
            _, index, link, freed = heappop(self.frees)
            self.freed_bytes += freed
            self.last[link] = index
        held_bytes = self.allocated_bytes - self.freed_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        # Links run in order, so those of one come in order: the last implies the rest.
        return self.last.values()


def add_fences(
    instructions: Sequence[Instruction],
    limit_bytes: Mapping[Tier, int],
    held_bytes: Mapping[Tier, int],
    rates: Rates,
) -> tuple[tuple[Instruction, ...], dict[Tier, int]]:
    """The instructions, each allocation waiting for the frees that it needs.

    And the most that any execution of them holds on each tier.

    Args:
        limit_bytes: what no execution may exceed; at least the peak in list order.
        held_bytes: what each tier holds when the step starts.
        rates: to predict which frees are done first.
    """
    held = held_bytes
    tiers = {t: _TierFence(limit_bytes[t], held[t], held[t]) for t in Tier}
    fenced, clock = [], Clock(rates)
    for index, instruction in enumerate(instructions):
        needed: dict[Tier, int] = defaultdict(int)
        for tier, nbytes in (*instruction.allocates, *instruction.workspace):
            needed[tier] += nbytes
        after = set(instruction.after)
        for tier, nbytes in needed.items():
            after.update(tiers[tier].admit(nbytes))
        fenced.append(replace(instruction, after=tuple(sorted(after))))
        end = clock.run(fenced[-1])
        returned = list(instruction.workspace)
        if isinstance(instruction.operation, Free):
            returned.append((instruction.operation.tier, instruction.nbytes))
        for tier, nbytes in returned:
            heappush(tiers[tier].frees, (end, index, instruction.link, nbytes))
    return tuple(fenced), {t: tiers[t].peak_bytes for t in Tier}
