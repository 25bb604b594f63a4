"""Which updates of a unit run as one executable, in the memory of their arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zinf.optim.decision import Pending
from zinf.optim.joint import JointStep
from zinf.plan import NO_EXCHANGE, ArrayUpdate, UpdateUnit
from zinf.prepare.updates import Updates
from zinf.program import ArrayId, Tier


@dataclass(frozen=True)
class JointUpdate:
    """Updates that one executable does, of arrays that rest on the devices."""

    arrays: tuple[ArrayUpdate, ...]
    step: JointStep

    def apply(
        self,
        gradients: Sequence[Any],
        operands: Sequence[Sequence[Any]],
        goes_by: Pending,
    ) -> Sequence[Sequence[Any]]:
        """New values of each update's results, computed or not. Donates operands."""
        factor = np.float32(goes_by.decision.factor)
        return self.step(factor, goes_by.step_values, gradients, operands)


@dataclass(frozen=True)
class UnitParts:
    """The updates of a unit: those that run jointly, and those that run one by one."""

    joint: tuple[JointUpdate, ...]
    single: tuple[ArrayUpdate, ...]


def unit_parts(
    updates: Updates, units: Iterable[UpdateUnit], homes: Mapping[ArrayId, Tier]
) -> list[UnitParts]:
    """How each unit runs: jointly as much of it as needs no more memory for that.

    Updates run together if they are element-wise, all that they touch rests on the
    devices in arrays of its own, and they need no more beside those than the largest
    of them alone.
    """
    return [_parts(updates, unit, homes) for unit in units]


def _parts(
    updates: Updates, unit: UpdateUnit, homes: Mapping[ArrayId, Tier]
) -> UnitParts:
    able = [
        update
        for update in unit.arrays
        if unit.tier == Tier.DEVICE and _may_be_joint(updates, update, homes)
    ]
    steps = updates.steps[Tier.DEVICE]
    joint = []
    for group in _groups({u: steps[u].workspace_bytes for u in able}):
        step = updates.joint([steps[u] for u in group])
        # Compiled together they may need other scratch than each alone.
        if step.workspace_bytes <= unit.workspace_bytes:
            joint.append(JointUpdate(group, step))
    done = {update for j in joint for update in j.arrays}
    return UnitParts(tuple(joint), tuple(u for u in unit.arrays if u not in done))


def _may_be_joint(
    updates: Updates, update: ArrayUpdate, homes: Mapping[ArrayId, Tier]
) -> bool:
    """Whether it is the same in other company, of arrays that rest on the devices."""
    return (
        updates.steps[Tier.DEVICE][update].is_elementwise
        and all(homes.get(array) == Tier.DEVICE for array in update.results)
        and update not in updates.own_parts
        and updates.exchanges[update] == NO_EXCHANGE
    )


def _groups(nbytes: Mapping[ArrayUpdate, int]) -> list[tuple[ArrayUpdate, ...]]:
    """Groups that need no more than the largest alone: each in the first with room."""
    limit = max(nbytes.values(), default=0)
    groups: list[list[ArrayUpdate]] = []
    free: list[int] = []
    for update in sorted(nbytes, key=nbytes.__getitem__, reverse=True):
        room = (i for i, left in enumerate(free) if nbytes[update] <= left)
        place = next(room, len(groups))
        if place == len(groups):
            groups.append([])
            free.append(limit)
        groups[place].append(update)
        free[place] -= nbytes[update]
    return [tuple(group) for group in groups]
