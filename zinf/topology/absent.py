"""Compiles for the devices of a mesh, present or absent."""

from functools import lru_cache

import jax
from jax.sharding import Mesh

from zinf.topology.uncached import uncached
from zinf_kernels.absent_gpu import OPTIONS


def compile_for(mesh: Mesh, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The executable of a program that was lowered for the devices of a mesh.

    Raises:
        jax.errors.JaxRuntimeError: the program does not compile; `out_of_memory` tells
            whether it ran out of memory.
    """
    first = mesh.devices.flat[0]
    if first in _present(first.platform):
        return lowered.compile()
    with uncached():
        # Only GPUs need options: without the device, XLA cannot time kernels.
        return lowered.compile(dict(OPTIONS) if first.platform == "gpu" else None)


@lru_cache
def _present(platform: str) -> frozenset[jax.Device]:
    try:
        return frozenset(jax.devices(platform))
    except RuntimeError:
        return frozenset()
