"""Restores what exchanges lost on devices of another number than it was saved on."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zinf.checkpoint.saved import Saved
from zinf.checkpoint.stripes import counted
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.sharding import AbstractParts

logger = logging.getLogger(__name__)
# Called with the path of a leaf and, of one device, the errors of what several saved;
# of several devices, with None, if they were saved on one.
Settle = Callable[[str, list[np.ndarray] | None], None]


@dataclass(frozen=True)
class OtherErrors:
    """The errors of a leaf, saved on another number of devices.

    Attributes:
        there: in the checkpoint; none if it is of one device, which loses nothing.
        here: of this run; none on one device.
    """

    path: str
    parts: AbstractParts
    there: tuple[ArrayId, ...]
    here: tuple[ArrayId, ...]


def other_errors(saved: Saved, residents: Residents) -> list[OtherErrors]:
    """The leaves whose errors come from those of another number of devices."""
    found = []
    for path in residents.layouts.gradients:
        parts = residents.layouts.restored_parts(path)
        if parts is None or not parts.error_shapes(parts.mesh.size):
            continue
        slots = range(len(parts.errors))
        arrays = [ArrayId(Role.ERROR, path, slot=slot) for slot in slots]
        there, here = (
            tuple(a for a in arrays if a in specs)
            for specs in (saved.arrays, residents.specs)
        )
        kinds = [saved.arrays[a] for a in there]
        shapes = tuple(x.shape for x in kinds)
        are_same = len(there) == len(here) and all(
            saved.arrays[a] == residents.specs[a] for a in here
        )
        count = shapes[0][1] if shapes and len(shapes[0]) > 1 else 0
        is_known = not there or (count > 0 and shapes == parts.error_shapes(count))
        if are_same or not is_known:
            continue
        if {x.dtype for x in kinds} <= {parts.error_dtype}:
            found.append(OtherErrors(path, parts, there, here))
    return found


def join(
    saved: Saved,
    residents: Residents,
    others: list[OtherErrors],
    settle: Settle,
    *,
    verify: bool,
) -> None:
    """Restore errors leaf by leaf, each array as a whole.

    Raises:
        BudgetExceeded: the host has no room for the errors of a leaf there and here.
    """
    begun = [one.path for one in others if not one.there]
    if begun:
        logger.warning(
            "Checkpoint %s has no errors of what devices send by signs (one device "
            "saved it, or an optimizer that sends gradients as they are): those of %s "
            "leaves begin at zero.",
            saved.directory,
            f"{len(begun):,}",
        )
    for one in others:
        settles = not one.there or not one.here
        sizes = [saved.arrays[a].nbytes for a in one.there]
        sizes += [residents.specs[a].nbytes for a in one.here]
        sizes += _settled_bytes(residents, one.path) if settles else []
        with counted({Tier.HOST: sum(sizes)}, residents, "restoring errors"):
            joined = [
                one.parts.joined(slot, saved.read(array, verify=verify))
                for slot, array in enumerate(one.there)
            ]
            for slot, array in enumerate(one.here):
                layout = one.parts.errors[slot]
                own = np.zeros(layout.share_shape, np.float32)
                if joined:
                    own = joined[slot][tuple(slice(*ends) for ends in layout.box)]
                residents.write_share(array, own)
            if settles:
                settle(one.path, joined or None)


def _settled_bytes(residents: Residents, path: str) -> list[int]:
    """What `settle` holds of arrays of a leaf: each in float32, and its new content."""
    itemsize = np.dtype(np.float32).itemsize
    return [
        2 * math.prod(spec.shape) * itemsize
        for array, spec in residents.specs.items()
        if array.path == path and array.role in (Role.PARAM, Role.MASTER, Role.STATE)
    ]
