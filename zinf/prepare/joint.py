"""Groups the device updates of a unit into executables that donate their operands."""

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
    """Updates that one executable runs. All their arrays rest on the devices."""

    arrays: tuple[ArrayUpdate, ...]
    step: JointStep

    def apply(
        self,
        gradients: Sequence[Any],
        operands: Sequence[Sequence[Any]],
        goes_by: Pending,
    ) -> Sequence[Sequence[Any]]:
        """New values of the results of each update. Donates `operands`.

        The values may still be in computation on return.
        """
        factor = np.float32(goes_by.decision.factor)
        return self.step(factor, goes_by.step_values, gradients, operands)


@dataclass(frozen=True)
class UnitParts:
    """The updates of a unit, split into those that run jointly and singly."""

    joint: tuple[JointUpdate, ...]
    single: tuple[ArrayUpdate, ...]


def unit_parts(
    updates: Updates, units: Iterable[UpdateUnit], homes: Mapping[ArrayId, Tier]
) -> list[UnitParts]:
    """Which updates of each unit run jointly, and which singly.

    Updates run jointly if they are element-wise, all their arrays rest on the devices,
    not as rows of larger arrays, and their workspace together is at most that of the
    largest of them alone.
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
        # The joint executable may need more workspace than the sum of the single ones.
        if step.workspace_bytes <= unit.workspace_bytes:
            joint.append(JointUpdate(group, step))
    done = {update for j in joint for update in j.arrays}
    return UnitParts(tuple(joint), tuple(u for u in unit.arrays if u not in done))


def _may_be_joint(
    updates: Updates, update: ArrayUpdate, homes: Mapping[ArrayId, Tier]
) -> bool:
    """Whether an update gives the same bits jointly, and its arrays rest on devices."""
    return (
        updates.steps[Tier.DEVICE][update].is_elementwise
        and all(homes.get(array) == Tier.DEVICE for array in update.results)
        and update not in updates.own_parts
        and updates.exchanges[update] == NO_EXCHANGE
    )


def _groups(nbytes: Mapping[ArrayUpdate, int]) -> list[tuple[ArrayUpdate, ...]]:
    """First-fit groups, each of which needs at most the bytes of the largest update."""
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
