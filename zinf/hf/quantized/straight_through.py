"""Weights rounded while they are trained: `rounding.nearest` in JAX, with a gradient.

The gradient of a rounded weight goes straight through the rounding
(https://arxiv.org/abs/1308.3432), and is 0 where a code is at its limit.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zinf.hf.quantized.rounding import Grid


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded(grid: Grid, weight: jax.Array, shift: jax.Array) -> jax.Array:
    """`nearest(weight, grid, shift).plain` in the dtype of the weight.

    Args:
        weight: [outputs, inputs]; it gets no gradient.
        shift: float32, of the weight's shape.
    """
    numbers, scales = _numbers(grid, weight, shift)
    codes = jnp.clip(jnp.rint(numbers), grid.low, -grid.low - 1)
    return (codes * scales).reshape(weight.shape).astype(weight.dtype)


def _forward(grid: Grid, weight: jax.Array, shift: jax.Array) -> tuple[Any, Any]:
    return rounded(grid, weight, shift), (weight, shift)


def _backward(grid: Grid, kept: Any, cotangent: jax.Array) -> tuple[Any, Any]:
    weight, shift = kept
    numbers, scales = _numbers(grid, weight, shift)
    # The largest weights of groups are half a code beyond the codes.
    is_within = (numbers >= grid.low - 0.5) & (numbers <= -grid.low - 0.5)
    given = cotangent.astype(jnp.float32).reshape(numbers.shape) * scales
    return jnp.zeros_like(weight), jnp.where(is_within, given, 0).reshape(shift.shape)


rounded.defvjp(_forward, _backward)


def _numbers(
    grid: Grid, weight: jax.Array, shift: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The numbers that are rounded to codes, [outputs, groups, group], and scales."""
    rows = weight.astype(jnp.float32).reshape(len(weight), -1, grid.group)
    largest = jnp.abs(rows).max(axis=2, keepdims=True)
    # Compilers multiply by the inverse of a constant, which has other bits.
    divisor = jnp.where(jnp.isfinite(largest), -grid.low - 0.5, jnp.nan)
    scales = (largest / divisor).astype(grid.dtype).astype(jnp.float32)
    least = jnp.finfo(grid.dtype).eps
    scales = jnp.where(scales > 0, scales, jnp.float32(least))
    return rows * (1 / scales) + shift.reshape(rows.shape), scales
