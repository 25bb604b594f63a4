"""Runs an executable on random numbers, to compare other implementations with it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from zinf.core.optim.separate import Separated
from zinf.core.optim.update import Unit, compile_updates

# Enough numbers that a difference shows; compiling takes longer than running on them.
PROBE_NUMEL = 1000


def normal(random: np.random.Generator, scale: float) -> np.ndarray:
    """`PROBE_NUMEL` numbers in float32."""
    return (random.standard_normal(PROBE_NUMEL) * scale).astype(np.float32)


def random_step_values(
    separated: Separated, random: np.random.Generator
) -> list[np.ndarray]:
    specs = separated.step_value_specs
    return [np.asarray(random.uniform(0.1, 0.9), s.dtype) for s in specs]


def compile_probe(
    separated: Separated, unit: Unit, *, device: jax.Device
) -> Callable[..., list[np.ndarray]]:
    """A unit's update of `PROBE_NUMEL` elements, from and to NumPy arrays.

    It takes `(factor, step_values, gradient, master, *states)`, as `UpdateStep` does.
    """
    unit = replace(unit, shape=(PROBE_NUMEL,))
    (step,) = compile_updates(separated, [unit], device=device).steps

    def execute(
        factor: np.float32, step_values: Sequence[Any], *arrays: np.ndarray
    ) -> list[np.ndarray]:
        # Copies, because the CPU backend would alias NumPy memory that changes later.
        placed = jax.device_put([x.copy() for x in arrays], device)
        return [np.asarray(x) for x in step(factor, step_values, *placed)]

    return execute
