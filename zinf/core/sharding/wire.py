"""What goes over a wire: how the parts of a leaf are gathered, and gradients exchanged.

Compiled programs gather and cut arrays here only. The layout of an array says what its
parts are sent as. Plain parts need sharding constraints alone, and GSPMD chooses the
collectives: it gathers a sharded parameter, and reduce-scatters a gradient that is a
sum over devices. Gather outside the differentiated function: a constraint transposes to
itself, so inside it would make the gradient whole on every device.

If the layout has an encoding, each device encodes its own part, gathers the encoded
parts of all, and decodes them (as in the all-gather transforms of FSDP2). Such a gather
must be outside the differentiated function, since rounding has no derivative.

[Note: parts of all groups] If groups of devices each hold a parameter (ZeRO++'s hpZ),
its share is cut among all devices: (group, device of the group, rest) along the cut
dim. A device then holds (group, rest): the part that it keeps itself, and what the same
device of every other group keeps. So after an update only these parts go to other
groups, once and encoded (`spread`), and a gather sends nothing between groups. A device
keeps its own part as it is, and those of others as decoded. Gathers encode each part by
itself, as `spread` did, so no number is rounded twice ([Note: rounded once]) and all
groups compute with the same weights.

On a TPU, plain cuts take two steps: over all dims of the torus but the last, and over
the last; so do plain gathers over 64 chips and more. In one step, XLA turns an
all-gather over all chips of such a three-dimensional torus into an all-reduce of
zero-padded parts, and the constraint of a gradient into an all-reduce and a slice. On
512 chips one step sends 6 times the bytes of all parameters per training step, two
steps send 3 times, and temporaries fall from 32 to 20 GiB (1T parameters, v5p:8x8x8).
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zinf.core.sharding.encoding import Blocks
from zinf.core.sharding.layout import Layout
from zinf.core.sharding.mesh import FSDP, REPLICA

OUTER, INNER = "outer", "inner"
# Over fewer chips XLA gathers in one step, as it is told to. Matmuls then hide 91% of
# the bytes on v5p:2x2x2, and 73% of those of two steps: first steps stay synchronous.
FEWEST_IN_TWO_GATHERS = 64


def gather(array: Any, layout: Layout) -> Any:
    """The whole of an array in its device form, without padding; traceable.

    Of experts, a device gets those that it has, whole.
    """
    if not layout.is_gathered:
        if layout.encoding is not None:
            array = _gather_encoded(layout.encoding, layout)(array)
        else:
            array = _gather_plain(array, layout)
    return layout.unpadded(array) if layout.is_padded else array


def _gather_plain(array: Any, layout: Layout) -> Any:
    half_way = _half_way(layout.device)
    if half_way is not None and half_way.mesh.size >= FEWEST_IN_TWO_GATHERS:
        array = jax.lax.with_sharding_constraint(array, half_way)
    return jax.lax.with_sharding_constraint(array, layout.computed)


def _gather_encoded(encoding: Blocks, layout: Layout) -> Callable:
    """`array -> array` on all devices, by way of encoded parts."""
    sharding, computed, groups = layout.device, layout.computed, layout.num_groups
    dim, axes = _cut_along(sharding, computed)

    def gather_here(own: Any) -> Any:
        shape = *own.shape[:dim], groups, -1, *own.shape[dim + 1 :]
        own = jnp.moveaxis(own.reshape(shape), dim, 0)
        sent = [jax.lax.all_gather(x, axes) for x in encoding.encode_all(own)]
        parts = encoding.decode(sent, own.shape[1:], own.dtype)
        by_group = jnp.swapaxes(parts.reshape(-1, *own.shape), 0, 1)
        return _joined(by_group.reshape(parts.shape), dim)

    # Devices along `axes` compute the same whole, which shard_map cannot see.
    return jax.shard_map(
        gather_here,
        mesh=_mesh_of(sharding),
        in_specs=sharding.spec,
        out_specs=computed.spec,
        check_vma=False,
    )


def spread(array: Any, layout: Layout) -> Any:
    """The device form of an array that an update made (`Layout.updated`); traceable.

    If groups hold it, each device sends its part to its counterparts in the others,
    encoded. See [Note: parts of all groups].
    """
    encoding, kept = layout.encoding, layout.share
    if layout.num_groups == 1:
        return array
    assert encoding is not None
    dim, _ = _cut_along(kept, layout.computed)

    def spread_here(own: Any) -> Any:
        sent = [jax.lax.all_gather(x, REPLICA) for x in encoding.encode(_exact(own))]
        parts = encoding.decode(sent, own.shape, own.dtype)
        return _joined(parts.at[jax.lax.axis_index(REPLICA)].set(own), dim)

    run = jax.shard_map(
        spread_here,
        mesh=_mesh_of(kept),
        in_specs=kept.spec,
        out_specs=layout.device.spec,
        check_vma=False,
    )
    return run(array)


def spread_bytes(layout: Layout, dtype: Any) -> int:
    """Bytes that one device sends in `spread`."""
    assert layout.encoding is not None
    own = jax.ShapeDtypeStruct(layout.share.shard_shape(layout.padded), dtype)
    sent = jax.eval_shape(layout.encoding.encode, own)
    return (layout.num_groups - 1) * sum(x.size * x.dtype.itemsize for x in sent)


def _exact(own: Any) -> Any:
    """Numbers of 16 bits in float32, rounded even if XLA drops the cast to 16 bits."""
    kind = jnp.finfo(own.dtype)
    wide = own.astype(jnp.float32)
    return jax.lax.reduce_precision(wide, kind.nexp, kind.nmant)


def _cut_along(before: NamedSharding, after: NamedSharding) -> tuple[int, Any]:
    """The dim that the first sharding cuts and the second does not, and its axes."""
    pairs = zip_longest(before.spec, after.spec)
    ((dim, axes),) = [(d, cut) for d, (cut, rest) in enumerate(pairs) if cut != rest]
    return dim, axes


def _joined(parts: Any, dim: int) -> Any:
    """Parts (parts, ...) one after another along a dim of theirs."""
    shape = parts.shape[1:]
    parts = jnp.moveaxis(parts, 0, dim)
    return parts.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def cut(array: Any, layout: Layout) -> Any:
    """A whole array in the device form of its layout, padded; traceable.

    If the layout is gathered, no constraint is added, so that the compiler may delay
    the sum over devices until the array is used.
    """
    if array.shape != layout.padded:
        sizes = zip(array.shape, layout.padded, strict=True)
        array = jnp.pad(array, [(0, size - n) for n, size in sizes])
    return array if layout.is_gathered else as_cut(array, layout.device)


def as_cut(array: Any, sharding: NamedSharding) -> Any:
    """A padded array under a sharding that cuts it; traceable."""
    half_way = _half_way(sharding)
    if half_way is not None:
        array = jax.lax.with_sharding_constraint(array, half_way)
    return jax.lax.with_sharding_constraint(array, sharding)


def _half_way(sharding: NamedSharding) -> NamedSharding | None:
    """The sharding over all torus dims but the last; None if one step suffices."""
    axes = [entry for entry in sharding.spec if entry is not None]
    mesh = _torus(_mesh_of(sharding))
    # An array cut along a part of the mesh is gathered in groups with few torus dims.
    if mesh is None or axes not in ([FSDP], [(FSDP,)]):
        return None
    entries = [None if entry is None else OUTER for entry in sharding.spec]
    return NamedSharding(mesh, PartitionSpec(*entries))


@lru_cache
def _torus(mesh: Mesh) -> Mesh | None:
    """All chips of a TPU torus as a mesh of two axes; the last dim is the inner axis.

    None if the mesh is not a TPU torus of two or more dims with all devices on `fsdp`.
    """
    devices = mesh.devices
    first = devices.flat[0]
    if first.platform != "tpu" or mesh.shape.get(FSDP) != devices.size:
        return None
    coords = np.asarray([device.coords for device in devices.flat])
    sizes = [int(n) for n in coords.max(axis=0) - coords.min(axis=0) + 1 if n > 1]
    if len(sizes) < 2 or np.prod(sizes) != devices.size:
        return None
    shape = devices.size // sizes[-1], sizes[-1]
    types = (AxisType.Auto, AxisType.Auto)
    return Mesh(devices.reshape(shape), (OUTER, INNER), axis_types=types)


def _mesh_of(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh
