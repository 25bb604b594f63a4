"""Which copies of a plan may be in one memory. [Note: shared memory]

Where a device computes in the memory of the host, a transfer between the two may make
an alias instead of a copy, if nobody sees the difference:

* up to the device: an array that nothing there computes anew, or has at home. On the
  host an update may change it in place; every plan therefore has such an update wait
  for those that read the array on the device (`Listing`), and its check proves that;
* down to the host: an array that has no home, that nothing there computes anew or hands
  to the drive (which wants pages of its own), and that the device leaves as it is then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zinf.plan.instruction import Instruction, Transfer
from zinf.program import ArrayId, Tier


@dataclass(frozen=True, slots=True)
class Shared:
    """Attributes:
    up, down: arrays whose copies on the device, and on the host, may be aliases.
    """

    up: frozenset[ArrayId]
    down: frozenset[ArrayId]


def shared_arrays(
    instructions: Sequence[Instruction], homes: Mapping[ArrayId, Tier]
) -> Shared:
    """What may share memory in a plan with arrays at `homes`."""
    up: set[ArrayId] = set()
    down: set[ArrayId] = set()
    not_up = {a.whole for a, tier in homes.items() if tier == Tier.DEVICE}
    not_down = {a.whole for a in homes}
    for instruction in instructions:
        operation = instruction.operation
        if isinstance(operation, Transfer):
            ends = operation.source, operation.target
            if ends == (Tier.HOST, Tier.DEVICE):
                up.update(operation.arrays)
            elif ends == (Tier.DEVICE, Tier.HOST):
                down.update(operation.arrays)
            else:
                not_down.update(a.whole for a in operation.arrays)
        else:
            for array, tier in instruction.writes:
                if tier == Tier.DEVICE:
                    not_up.add(array.whole)
                    if array in down:
                        not_down.add(array.whole)
                else:
                    not_down.add(array.whole)
    # Rows that go up beside the whole are written into it there.
    not_up |= {a.whole for a in up if a.rows is not None and a.whole in up}
    return Shared(
        frozenset(a for a in up if a.whole not in not_up),
        frozenset(a for a in down if a.whole not in not_down),
    )
