"""Runs Mosaic GPU kernels on the CPU, slowly: for tests of their numbers.

It also finds reads of data that TMA has not copied yet, which are NaN, and, from jax
0.11 on, races between warpgroups and transfers, which raise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

IS_OLD = jax.__version_info__ < (0, 11)
if IS_OLD:
    from jax._src.pallas.mosaic_gpu.interpret import params as modes
else:
    modes: Any = plgpu
# Three warpgroups on two cores hung in 4 of 4 runs, and in none of 4 with NPROC=8 in
# the environment, which gives XLA eight threads.
LOCKS_UP = (
    "Warpgroups that wait in the interpreter of jax before 0.11 hold threads of XLA, "
    "and may leave none for the others."
)


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it kernels are interpreted, if they were not traced before."""
    mode = modes.InterpretGPUParams(detect_races=not IS_OLD)
    with modes.force_gpu_interpret_mode(mode):
        yield
