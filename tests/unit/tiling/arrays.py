"""Arrays of the tests of tiles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(
    shape: tuple[int, ...], dtype: Any = jnp.float32, *, seed: int = 0, scale: float = 1
) -> jax.Array:
    made = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(made, dtype)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
