"""The rule that keeps concurrent links within a budget. [Note: fences]

At each allocation of the plan, count all allocations listed up to it, less only the
frees that it waits for. If this count never exceeds the budget, no execution exceeds
it. Proof: at any moment let i be the last listed allocation that has started. All bytes
held were allocated at or before i, and the frees that i waited for are done.

So an allocation waits for enough of the frees listed before it to make its bytes fit,
earliest predicted end first. If it fits without, it waits for none.

The limit is not the budget of the tier but the plan's own peak in list order. So the
peak that the plan states is an upper bound on what is measured, even if the budget is
larger.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from zinf.core.plan.cost import Clock, Rates
from zinf.core.plan.instruction import Free, Instruction
from zinf.core.program import Link, Tier


@dataclass
class _TierFence:
    limit_bytes: int
    allocated_bytes: int
    peak_bytes: int
    freed_bytes: int = 0  # Of the frees that an allocation waits for.
    # The other frees: predicted end, instruction, link, bytes.
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
        # Links run in order, so the last free of a link implies its earlier ones.
        return self.last.values()


def add_fences(
    instructions: Sequence[Instruction],
    limit_bytes: Mapping[Tier, int],
    held_bytes: Mapping[Tier, int],
    rates: Rates,
) -> tuple[tuple[Instruction, ...], dict[Tier, int]]:
    """Makes each allocation wait for the frees that it needs.

    Args:
        limit_bytes: bytes that no execution may exceed; at least the peak in list
            order.
        held_bytes: bytes that each tier holds when the step starts.
        rates: predict which frees are done first.

    Returns:
        The instructions, and the most bytes that any execution holds on each tier.
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
