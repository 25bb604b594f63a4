"""Brings experts that tokens chose to slots on the device, and knows what is there."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from zinf.core.memory import Key, Slots, Stores
from zinf.core.plan import FetchChosen, Instruction, value
from zinf.core.program import ArrayId, Chosen, Program, Role, Tier


class ChosenExperts:
    """The experts of a program that are read on demand, while it holds its slots.

    Args:
        slots: by the names of their arrays.
    """

    def __init__(self, program: Program, slots: Mapping[tuple[str, ...], Slots]):
        self.chosen, self.slots = program.chosen, slots

    def forget_others(self) -> None:
        """Empty slots that hold experts which this program does not read on demand.

        Training does it: its steps may change them.
        """
        own = {each.arrays for each in self.chosen}
        for slots in self.slots.values():
            slots.forget_others(own)

    def fetch(
        self, operation: FetchChosen, instruction: Instruction, stores: Stores
    ) -> int:
        """Bring what a microbatch chose to slots; return the bytes that were read."""
        chosen = self.chosen[operation.chosen]
        choice = stores.host.read(value(chosen.choice, operation.microbatch)).result()
        # A number out of range is no expert.
        numbers = [int(x) for x in np.unique(choice) if 0 <= x < chosen.num_experts]
        slots = self.slots[chosen.slots]
        assert len(numbers) <= slots.count, "slots are as many as may be chosen"
        missing = slots.use((chosen.arrays, number) for number in numbers)
        homes = dict(instruction.reads)
        moved = 0
        try:
            for first in range(0, len(missing), operation.most_at_once):
                some = missing[first : first + operation.most_at_once]
                moved += _fetch(chosen, some, homes, slots, stores)
        except BaseException:
            slots.forget()
            raise
        table = np.zeros(chosen.num_experts, np.int32)
        for number in numbers:
            table[number] = slots.slot_of[chosen.arrays, number]
        where = value(chosen.table, operation.microbatch)
        stores.device.write(where, table).result()
        return moved


def _fetch(
    chosen: Chosen,
    keys: Sequence[Key],
    homes: Mapping[ArrayId, Tier],
    slots: Slots,
    stores: Stores,
) -> int:
    """Read experts, all at once, and write one after another to a slot."""
    reads = [
        [stores[homes[a]].read(a.piece((n, n + 1))) for a in chosen.arrays]
        for _, n in keys
    ]
    moved = 0
    for key, row in zip(keys, reads, strict=True):
        slot = slots.free_slot()
        for name, read in zip(chosen.slots, row, strict=True):
            content, where = read.result(), ArrayId(Role.CONST, name)
            stores.device.write(where.piece((slot, slot + 1)), content).result()
            # The row is dropped before the next one takes the same memory.
            jax.block_until_ready(stores.device.read(where).result())
            moved += content.nbytes
        slots.slot_of[key] = slot
    return moved
