"""Compiling for the devices of a mesh, whether they are there or not."""

from functools import lru_cache

import jax
from jax.sharding import Mesh

from zinf.topology.uncached import uncached
from zinf_kernels.absent_gpu import OPTIONS


def compile_for(mesh: Mesh, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The executable of a program that was lowered for the devices of a mesh.

    Raises:
        jax.errors.JaxRuntimeError: it does not compile; `shortage` says if it does not
            fit.
    """
    first = mesh.devices.flat[0]
    if first in _present(first.platform):
        return lowered.compile()
    with uncached():
        # Only GPUs need options: nothing can be timed on those that are not there.
        return lowered.compile(dict(OPTIONS) if first.platform == "gpu" else None)


@lru_cache
def _present(platform: str) -> frozenset[jax.Device]:
    try:
        return frozenset(jax.devices(platform))
    except RuntimeError:
        return frozenset()
