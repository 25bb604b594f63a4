"""Which experts a program reads on demand, and how many slots they get."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from zinf.core.plan import InfeasibleError
from zinf.core.problem.source import Source
from zinf.core.program import ArrayId, Program, Role, Tier, is_worthwhile
from zinf.core.segment.chosen import (
    NO_TABLES,
    Tables,
    find_experts,
    in_slots,
    inlined_experts,
    slot_counts,
)
from zinf.core.step.setup import Setup
from zinf.core.step.shrink import SPARE

# Bytes for slots: none, and as few as one microbatch may need.
NO_SLOTS, LEAST_SLOTS = 0, 1


def frozen_experts_apart(setup: Setup, source: Source) -> Source:
    """A traced loss in which frozen experts are equations of its own, if there are any.

    A `jax.checkpoint` around them is gone: the cuts around them recompute as it would.
    """
    apart = inlined_experts(source, is_trained=True)
    is_any = any(x.leaves.keys() <= setup.frozen for x in find_experts(apart))
    return apart if is_any else source


@dataclass(frozen=True)
class OnDemand:
    """The experts of a program that may be read on demand.

    Attributes:
        paths: the leaves that the program reads as they are, and does not change.
        homes: where arrays rest.
        slot_bytes: bytes of the device for slots, if the config does not say.
    """

    setup: Setup
    paths: Set[str]
    homes: Mapping[ArrayId, Tier]
    num_microbatches: int
    slot_bytes: int

    @property
    def is_automatic(self) -> bool:
        return self.setup.config.expert_bytes is None

    @property
    def bytes_for_slots(self) -> int:
        asked = self.setup.config.expert_bytes
        return self.slot_bytes if asked is None or not self.slot_bytes else asked

    def layers_in(self, source: Source) -> list[tuple[int, int, int]]:
        """As `Source.whole_experts`, those away from the device, of a whole step."""
        return [
            (each.num_experts, k, self.num_microbatches * num_tokens)
            for each in find_experts(source)
            for num_tokens, k in [each.choices]
            if any(map(self._is_away, each.leaves))
        ]

    def with_slots(self, source: Source) -> tuple[Source, Tables]:
        """The program that reads experts on demand which do not rest on the device.

        Raises:
            ValueError: the config asks for fewer slots than a token needs.
        """
        if not self.bytes_for_slots:
            return source, NO_TABLES
        experts = [x for x in find_experts(source) if x.leaves.keys() <= self.paths]
        away = {path for each in experts for path in each.leaves if self._is_away(path)}
        asked = self.setup.config.expert_bytes
        num_slots = slot_counts(experts, away, self.bytes_for_slots, asked)
        worthwhile = {
            each.kind(away)
            for each in experts
            if (kind := each.kind(away)) in num_slots
            and is_worthwhile(
                each.num_experts,
                *reversed(each.choices),
                num_slots=None if self.is_automatic else num_slots[kind],
                num_microbatches=self.num_microbatches,
            )
        }
        num_slots = {kind: num_slots[kind] for kind in worthwhile}
        return in_slots(source, experts, away, num_slots)

    def _is_away(self, path: str) -> bool:
        home = self.homes.get(ArrayId(Role.PARAM, path))
        return home not in (None, Tier.DEVICE)

    def with_fewer(self, program: Program, error: InfeasibleError) -> "OnDemand | None":
        """For a program that lacks device memory; None if it has the fewest slots."""
        short = error.shortages.get(Tier.DEVICE)
        is_least = all(each.num_slots == each.most for each in program.chosen)
        if short is None or not program.chosen or is_least or not self.is_automatic:
            return None
        left = self.slot_bytes - short.missing_bytes
        return replace(self, slot_bytes=max(LEAST_SLOTS, left - left // SPARE))

    def with_room(self, program: Program, room_bytes: int) -> "OnDemand | None":
        """For a program beside which so many bytes are left for more slots.

        None if no further expert fits there, or the config says how many there are.
        """
        own = [each for each in program.chosen if each.num_slots < each.num_sharing]
        sizes = [
            sum(program.values[n].nbytes for n in x.slots) // x.num_slots for x in own
        ]
        if not self.is_automatic or room_bytes < min(sizes, default=room_bytes + 1):
            return None
        return replace(self, slot_bytes=program.slot_bytes + room_bytes)
