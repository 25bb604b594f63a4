"""Which compiler options a mesh needs if its devices are not there."""

from functools import lru_cache

import jax
from jax.sharding import Mesh

from zinf_kernels.absent_gpu import OPTIONS


def compiler_options(mesh: Mesh) -> dict[str, bool | str]:
    """What `jax.stages.Lowered.compile` needs for the devices of a mesh.

    Only GPUs that are not there need anything: nothing can be timed on them.
    """
    first = mesh.devices.flat[0]
    is_absent_gpu = first.platform == "gpu" and first not in _present(first.platform)
    return dict(OPTIONS) if is_absent_gpu else {}


@lru_cache
def _present(platform: str) -> frozenset[jax.Device]:
    try:
        return frozenset(jax.devices(platform))
    except RuntimeError:
        return frozenset()
