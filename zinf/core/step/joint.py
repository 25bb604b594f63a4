"""Groups the device updates of a unit into executables that donate their operands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zinf.core.optim.joint import JointStep
from zinf.core.plan import (
    NO_EXCHANGE,
    Arrangement,
    ArrayUpdate,
    Group,
    Update,
    UpdateUnit,
)
from zinf.core.program import ArrayId, Tier
from zinf.core.step.updates import Updates


@dataclass(frozen=True)
class JointUpdate:
    """Updates that one executable runs. All their arrays rest on the devices."""

    arrays: tuple[ArrayUpdate, ...]
    step: JointStep


Joint = Mapping[Group, JointUpdate]


def grouped(arranged: Arrangement, updates: Updates) -> tuple[Arrangement, Joint]:
    """The arrangement with updates grouped to run together, and their executables.

    Updates run together if they are element-wise, all their arrays rest on the devices,
    not as rows of larger arrays, and their workspace together is at most that of the
    largest of them alone.
    """
    found = [_joint(updates, unit, arranged.plan.homes) for unit in arranged.units]
    groups = [tuple(joint) for joint in found]
    plans = {}
    for name in ("plan", "first", "flush"):
        plan = getattr(arranged, name)
        if plan is not None:
            plans[name] = plan.grouped(groups)
    joint = {group: update for some in found for group, update in some.items()}
    return replace(arranged, **plans), joint


def jointly_and_singly(
    operation: Update, units: Sequence[UpdateUnit], joint: Joint
) -> tuple[list[JointUpdate], list[ArrayUpdate]]:
    """The grouped updates of an operation, and the updates that run alone."""
    together = [joint[group] for group in operation.groups]
    done = {update for each in together for update in each.arrays}
    return together, [u for u in units[operation.unit].arrays if u not in done]


def _joint(
    updates: Updates, unit: UpdateUnit, homes: Mapping[ArrayId, Tier]
) -> dict[Group, JointUpdate]:
    joinable = [
        update
        for update in unit.arrays
        if unit.tier == Tier.DEVICE and _may_be_joint(updates, update, homes)
    ]
    steps = updates.steps[Tier.DEVICE]
    found = {}
    for some in _groups({u: steps[u].workspace_bytes for u in joinable}):
        step = updates.joint([steps[u] for u in some])
        # The joint executable may need more workspace than the sum of the single ones.
        if step.workspace_bytes <= unit.workspace_bytes:
            arrays = tuple(a for update in some for a in update.results)
            found[Group(arrays, step.workspace_bytes)] = JointUpdate(some, step)
    return found


def _may_be_joint(
    updates: Updates, update: ArrayUpdate, homes: Mapping[ArrayId, Tier]
) -> bool:
    """Whether an update has the same bits in a group, and its arrays are on devices."""
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
