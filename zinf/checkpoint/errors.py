"""Restores what exchanges lost on devices of another number than it was saved on."""

from zinf.checkpoint.saved import Saved
from zinf.checkpoint.stripes import counted
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, Role, Tier


def to_join(saved: Saved, residents: Residents) -> frozenset[ArrayId]:
    """The errors here that come from those of another number of devices."""
    found = set[ArrayId]()
    for path, parts in residents.layouts.parts.items():
        slots = range(len(parts.errors))
        arrays = [ArrayId(Role.ERROR, path, slot=slot) for slot in slots]
        there = [saved.arrays[a] for a in arrays if a in saved.arrays]
        here = [residents.specs[a] for a in arrays]
        if not there or [x.dtype for x in there] != [x.dtype for x in here]:
            continue
        shapes = tuple(x.shape for x in there)
        are_others = shapes != tuple(x.shape for x in here)
        if are_others and shapes == parts.error_shapes(shapes[0][1]):
            found.update(arrays)
    return frozenset(found)


def join(saved: Saved, residents: Residents, *, verify: bool) -> None:
    """Restore the errors of `to_join`, one after the other and each as a whole.

    Raises:
        BudgetExceeded: the host has no room for an array of errors there and here.
    """
    wanted = to_join(saved, residents)
    for path, parts in residents.layouts.parts.items():
        for slot, layout in enumerate(parts.errors):
            array = ArrayId(Role.ERROR, path, slot=slot)
            if array not in wanted:
                continue
            nbytes = saved.arrays[array].nbytes + residents.specs[array].nbytes
            with counted({Tier.HOST: nbytes}, residents, "restoring errors"):
                content = parts.joined(slot, saved.read(array, verify=verify))
                own = content[tuple(slice(*ends) for ends in layout.box)]
                residents.write_share(array, own)
