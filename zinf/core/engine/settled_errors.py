"""What signs lost goes over from several devices to one, or begins after one."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from zinf.core.engine.named import MASTER, array_of, writes_of
from zinf.core.engine.scalars import Scalars
from zinf.core.memory import Residents
from zinf.core.program import ArrayId, Role
from zinf.core.step.planner import Planner


def settle_errors(
    planner: Planner,
    residents: Residents,
    scalars: Scalars,
    path: str,
    errors: Sequence[np.ndarray] | None,
) -> None:
    """Begin with what was restored for a leaf, if only there or here errors are kept.

    Args:
        errors: those of one device, which adds them to what it keeps; None: several
            devices go on from one.
    """
    leaf = next(leaf for leaf in planner.separated.leaves if leaf.path == path)
    kinds = MASTER, *leaf.named_states()
    arrays = {
        kind: residents.read(array_of(planner, path, kind)).astype(np.float32)
        for kind in kinds
    }
    rule, number = planner.rule, scalars.num_steps
    if errors is not None:
        assert rule.unused_compression is not None
        new = rule.unused_compression.merged(number, errors, arrays)
        for kind, value in new.items():
            dtype = residents.specs[array_of(planner, path, kind)].dtype
            value = value.astype(jnp.dtype(dtype))
            writes = writes_of(planner, residents, path, value, kind)
            for array, content in writes.items():
                residents.write(array, content)
        return
    assert rule.compression is not None
    layouts = residents.layouts.parts[path].errors
    begun = rule.compression.begun(number, [x.shape for x in layouts], arrays)
    for slot, content in begun.items():
        own = content[tuple(slice(*ends) for ends in layouts[slot].box)]
        residents.write_share(ArrayId(Role.ERROR, path, slot=slot), own)
