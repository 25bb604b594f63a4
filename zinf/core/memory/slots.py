"""Slots of experts on the device: which expert each of them holds."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from zinf.core.program import ArrayId

# The arrays that an expert is a row of, and its number.
Key = tuple[tuple[ArrayId, ...], int]


@dataclass
class Slots:
    """Which expert each slot holds.

    Attributes:
        slot_of: experts with their slots, those first that were used longest ago.
        is_spare: no program has the slots now. They stay for the next one that does,
            until their memory is needed.
    """

    count: int
    slot_of: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    is_spare: bool = False

    def use(self, wanted: Iterable[Key]) -> list[Key]:
        """Notes that experts are used now; returns those that are in no slot."""
        missing = []
        for key in wanted:
            if key in self.slot_of:
                self.slot_of.move_to_end(key)
            else:
                missing.append(key)
        return missing

    def free_slot(self) -> int:
        """A slot without an expert; drops the one that was used longest ago."""
        if len(self.slot_of) < self.count:
            return len(self.slot_of)
        return self.slot_of.popitem(last=False)[1]

    def forget(self) -> None:
        """Take all slots for empty: what they hold is old, or was written in part."""
        self.slot_of.clear()

    def forget_others(self, own: Collection[tuple[ArrayId, ...]]) -> None:
        """Take all slots for empty if some hold experts of other arrays than `own`."""
        if any(arrays not in own for arrays, _ in self.slot_of):
            self.forget()

    def has_rows_of(self, path: str) -> bool:
        return any(path == a.path for arrays, _ in self.slot_of for a in arrays)
