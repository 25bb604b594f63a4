"""The device mesh: its axes, the dims that they cut, and the devices of one process.

A mesh is a `jax.sharding.Mesh` with axes named below, in any order; an axis that it
lacks has size 1. `zinf.core.sharding.rule` says which arrays are cut, and where.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import prod
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

REPLICA, FSDP, SEQ, EXPERT, TENSOR = "replica", "fsdp", "seq", "expert", "tensor"


class Dim(StrEnum):
    """The meaning of a dim of an array or value."""

    BATCH = "batch"  # Examples.
    SEQUENCE = "sequence"  # Positions of each example.
    HEADS = "heads"  # Of an attention, which needs all positions of a head.
    EXPERTS = "experts"  # Each row is read by one expert.
    CHANNELS = "channels"  # Columns of a weight, and rows of the one that follows.
    LAYERS = "layers"  # Each row is read by one layer: an array of its own.
    ROWS = "rows"  # Any dim of state that ZeRO may cut.


class InnerAxis(NamedTuple):
    """An axis of the devices of a group, beside `fsdp`.

    Attributes:
        divided: what its devices divide, for messages.
        dims: the logical dims that it cuts.
        has_examples: whether its devices compute other examples too.
    """

    name: str
    divided: str
    dims: tuple[Dim, ...]
    has_examples: bool = False


INNER_AXES = (
    InnerAxis(SEQ, "sequences", (Dim.SEQUENCE, Dim.HEADS)),
    # Devices with other experts compute other examples in the rest of a model.
    InnerAxis(EXPERT, "experts", (Dim.EXPERTS,), has_examples=True),
    InnerAxis(TENSOR, "weights", (Dim.CHANNELS,)),
)
AXES = (REPLICA, FSDP, *(axis.name for axis in INNER_AXES))

DIM_AXES: Mapping[Dim, tuple[str, ...]] = {
    Dim.BATCH: (REPLICA, FSDP, *(x.name for x in INNER_AXES if x.has_examples)),
    **{dim: (axis.name,) for axis in INNER_AXES for dim in axis.dims},
    Dim.LAYERS: (),
    # Devices with other positions of the same examples are data-parallel too, and
    # those with other parts of weights have the same copy of all other leaves.
    Dim.ROWS: AXES[1:],
}


def make_mesh(
    devices: Sequence[jax.Device],
    *,
    num_replicas: int = 1,
    num_seq: int = 1,
    num_expert: int = 1,
    num_tensor: int = 1,
) -> Mesh:
    """A mesh of `num_replicas` groups of devices; each group holds the whole state.

    In a group, `num_seq` devices each divide the positions of the same examples,
    `num_expert` devices each divide the experts of a layer, and `num_tensor` devices
    each divide the weights of a layer.

    The devices keep their order. In the order of `jax.devices()`, devices of one
    process are neighbours along `fsdp`, so a process stores one block of an array.

    Raises:
        ValueError: the devices do not divide evenly into the groups.
    """
    sizes = {SEQ: num_seq, EXPERT: num_expert, TENSOR: num_tensor}
    inner = prod(sizes.values())
    if len(devices) % (num_replicas * inner) and inner > 1:
        asked = [axis for axis in INNER_AXES if sizes[axis.name] > 1]
        groups = " and ".join(
            f"of {sizes[axis.name]} that divide {axis.divided}" for axis in asked
        )
        keys = " or ".join(f"mesh.{axis.name}" for axis in asked)
        raise ValueError(
            f"{len(devices)} devices cannot be divided into {num_replicas} replicas, "
            f"each of groups {groups}. Set {keys} to a divisor."
        )
    if len(devices) % num_replicas:
        raise ValueError(
            f"{len(devices)} devices cannot be divided into {num_replicas} replicas of "
            "the same size. Set mesh.replica (or mics_shard_size) to a divisor."
        )
    num_shards = len(devices) // (num_replicas * inner)
    shape = (num_replicas, num_shards, *(sizes[axis.name] for axis in INNER_AXES))
    # With Explicit axes, jax's default, `w @ w.T` in a model is a type error.
    types = (AxisType.Auto,) * len(AXES)
    return Mesh(np.asarray(devices, object).reshape(shape), AXES, axis_types=types)


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError if training cannot run on the mesh."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh must be a jax.sharding.Mesh; found {mesh!r:.60}. "
            "zinf.make_mesh(devices) makes one."
        )
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise ValueError(
            f"The mesh has the axes {', '.join(map(str, unknown))}, which zinf does "
            f"not know. Name its axes of {', '.join(AXES)}, in any order."
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"The mesh has axes of the types {mesh.axis_types}; all must be "
            "jax.sharding.AxisType.Auto, so that models written for one device run "
            "on it. zinf.make_mesh(devices) makes such a mesh."
        )


def axis_size(mesh: Mesh, names: Iterable[str]) -> int:
    """The product of the sizes of some axes; an axis that the mesh lacks has size 1."""
    return prod(mesh.shape.get(name, 1) for name in names)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def local_devices(mesh: Mesh) -> list[jax.Device]:
    """The devices of a mesh that belong to this process.

    If none does, programs are only compiled for the mesh, and the devices of its first
    host are returned.
    """
    local = set(mesh.local_devices)
    if not local:
        first = mesh.devices.flat[0].process_index
        local = {d for d in mesh.devices.flat if d.process_index == first}
    return [d for d in mesh.devices.flat if d in local]


def first_cpu() -> jax.Device:
    """The first local device of the CPU backend, on which jax computes for the host.

    Raises:
        ValueError: JAX_PLATFORMS names platforms, and not the CPU.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        named = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(
            "Optimizer state and scalars are computed on the CPU, and jax has no CPU "
            f"devices here: JAX_PLATFORMS is {named!r}. Set it to "
            f"'{named or jax.default_backend()},cpu', or unset it, before Python "
            "starts."
        ) from error
