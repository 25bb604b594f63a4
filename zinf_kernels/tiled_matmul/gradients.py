"""The backward pass of `matmul`, by XLA's matmuls."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf_kernels.pieces import accumulator, matmul


def gradients(
    a: Float[Array, "m k"], b: Float[Array, "k n"], by_result: Float[Array, "m n"]
) -> tuple[Array, Array, Array]:
    """Cotangents of `a` and `b` in their dtype, and of a bias in float32 or better."""
    # In the dtype of the factors: a matmul of float32 with bfloat16, which jax would
    # make of this by itself, does not run on the matrix units.
    slope = by_result.astype(a.dtype)
    by_a = matmul(slope, b, (1, 1)).astype(a.dtype)
    by_b = matmul(a, slope, (0, 0)).astype(b.dtype)
    by_bias = jnp.sum(by_result, axis=0, dtype=accumulator(a.dtype))
    return by_a, by_b, by_bias
