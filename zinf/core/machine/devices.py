"""The mesh of devices that a config asks for, and the config loaded for that mesh."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from zinf.core.config import Config, Grouping, grouping
from zinf.core.process.compile_cache import keep_compiled
from zinf.core.sharding import num_data_parallel
from zinf.core.sharding.mesh import check_mesh, make_mesh

logger = logging.getLogger(__name__)


def on_devices(
    source: Config | Mapping[str, Any] | str | Path | None,
    mesh: Mesh | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Config, Mesh]:
    """Load a config for the devices of a mesh; return both.

    From here on jax keeps what it compiles where the config says.

    Args:
        mesh: None makes the mesh that the config asks for.

    Raises:
        ValueError: the config is wrong, or the devices that it asks for do not exist.
    """
    mesh = mesh_for(grouping(source, overrides)) if mesh is None else mesh
    check_mesh(mesh)
    config = Config.load(source, overrides, world_size=num_data_parallel(mesh))
    keep_compiled(config.compile_cache)
    return config, mesh


def mesh_for(asked: Grouping) -> Mesh:
    """The mesh that a config asks for, on the devices that jax has.

    Raises:
        ValueError: jax has fewer devices, or they cannot be divided into the groups
            that the config asks for.
    """
    devices = jax.devices()
    if asked.num_shards is not None:
        sizes = [asked.num_replicas, asked.num_shards, *asked.inner_sizes.values()]
        wanted = prod(sizes)
        if wanted > len(devices):
            keys = ["mesh.replica", "mesh.fsdp", *asked.inner_sizes]
            raise ValueError(
                f"mesh asks for {' x '.join(map(str, sizes))} = {wanted} devices, and "
                f"jax has {len(devices)} ({devices[0].platform}). Lower "
                f"{', '.join(keys[:-1])} or {keys[-1]}, start more processes, or, to "
                "plan for a machine that is not here, name it: "
                "zinf plan --topology h200:8."
            )
        devices = devices[:wanted]
    elif devices[0].platform == "cpu" and jax.process_count() == 1:
        if not asked.is_given and len(devices) > 1:
            say_unused(len(devices))
            devices = devices[:1]
    return group_devices(devices, asked)


@cache
def say_unused(num_devices: int) -> None:
    """Warn that one CPU device of several trains; once a process."""
    logger.warning(
        "1 of %d CPU devices is used: they share the cores and the memory of this "
        "machine. To train on all of them, set mesh: {fsdp: %d} in the config.",
        num_devices,
        num_devices,
    )


def group_devices(devices: Sequence[jax.Device], asked: Grouping) -> Mesh:
    """The mesh of all `devices`, in the groups that a config asks for.

    Raises:
        ValueError: the devices cannot be divided into groups of that size.
    """
    num_replicas = asked.num_replicas
    if asked.group_size is not None:
        if len(devices) % asked.group_size:
            raise ValueError(
                f"{len(devices)} devices cannot be divided into groups of "
                f"{asked.group_size}. Change zero_hpz_partition_size or "
                "mics_shard_size to a divisor."
            )
        num_replicas = len(devices) // asked.group_size
    counts = {f"num_{axis}": count for axis, count in asked.inner.items()}
    return make_mesh(devices, num_replicas=num_replicas, **counts)
