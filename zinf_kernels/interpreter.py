"""Runs Mosaic GPU kernels on the CPU, slowly: for tests of their numbers.

It also finds deadlocks, and reads of what TMA has not brought yet, which show as NaNs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

if jax.__version_info__ < (0, 11):
    from jax._src.pallas.mosaic_gpu.interpret import params as modes
else:
    modes: Any = plgpu


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it kernels are interpreted, if they were not traced before."""
    with modes.force_gpu_interpret_mode(modes.InterpretGPUParams()):
        yield
