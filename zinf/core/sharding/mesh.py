"""The device mesh: its axes, and the devices of one process.

A mesh is a `jax.sharding.Mesh` with axes named below, in any order; an axis that it
lacks has size 1. `zinf.core.sharding.rule` says which dims of arrays are cut along
which axes.
"""

import os
from collections.abc import Iterable, Sequence
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

REPLICA, FSDP, SEQ, EXPERT, TENSOR = "replica", "fsdp", "seq", "expert", "tensor"
AXES = (REPLICA, FSDP, SEQ, EXPERT, TENSOR)


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
    inner = num_seq * num_expert * num_tensor
    if len(devices) % (num_replicas * inner) and inner > 1:
        counts = {"sequences": num_seq, "experts": num_expert, "weights": num_tensor}
        groups = " and ".join(
            f"of {count} that divide {what}"
            for what, count in counts.items()
            if count > 1
        )
        names = {
            "mesh.seq": num_seq,
            "mesh.expert": num_expert,
            "mesh.tensor": num_tensor,
        }
        asked = " or ".join(name for name, count in names.items() if count > 1)
        raise ValueError(
            f"{len(devices)} devices cannot be divided into {num_replicas} replicas, "
            f"each of groups {groups}. Set {asked} to a divisor."
        )
    if len(devices) % num_replicas:
        raise ValueError(
            f"{len(devices)} devices cannot be divided into {num_replicas} replicas of "
            "the same size. Set mesh.replica (or mics_shard_size) to a divisor."
        )
    num_shards = len(devices) // (num_replicas * inner)
    shape = (num_replicas, num_shards, num_seq, num_expert, num_tensor)
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
