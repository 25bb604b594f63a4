"""Finds the arrays whose host and device copies may share memory. [Note: shared memory]

If a device computes in the memory of the host, a transfer between the two may make an
alias instead of a copy, provided that no instruction can see the difference:

* host to device: the array does not rest on the device, and no instruction there writes
  it. An update on the host may change the array in place, so in every plan such an
  update waits for the device instructions that read the array (`Listing`), and `check`
  proves this.
* device to host: the array has no home, no instruction on the host writes it or sends
  it to nvme (which needs page-aligned memory), and the device does not write it after
  the transfer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zinf.core.plan.instruction import Instruction, Transfer
from zinf.core.program import ArrayId, Tier


@dataclass(frozen=True, slots=True)
class Shared:
    """Arrays that may be aliases.

    Attributes:
        up: arrays whose device copy may be an alias of the host copy.
        down: arrays whose host copy may be an alias of the device copy.
    """

    up: frozenset[ArrayId]
    down: frozenset[ArrayId]


def shared_arrays(
    instructions: Sequence[Instruction], homes: Mapping[ArrayId, Tier]
) -> Shared:
    """The arrays that may share memory in a plan with these `homes`."""
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
    # If both a whole and its rows go up, the rows are written into the device's whole.
    not_up |= {a.whole for a in up if a.rows is not None and a.whole in up}
    return Shared(
        frozenset(a for a in up if a.whole not in not_up),
        frozenset(a for a in down if a.whole not in not_down),
    )
