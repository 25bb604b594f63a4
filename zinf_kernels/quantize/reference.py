"""What `quantize` and `dequantize` mean, in plain jnp; XLA fuses each into a pass."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int8, UInt32

from zinf_kernels.quantize.rounding import (
    packed,
    random_bits,
    scale_and_inverse,
    to_integers,
    unpacked,
)


@partial(jax.jit, static_argnames=("bits", "num_cores"))
def quantize(
    x: Float[Array, "blocks block_size"],
    seed: UInt32[Array, "2"] | None,
    *,
    bits: int,
    num_cores: int,
) -> tuple[Int8[Array, "blocks width"], Float32[Array, " blocks"]]:
    """Values and scales as `Quantized` has them."""
    del num_cores  # XLA cuts the work itself.
    x = x.astype(jnp.float32)
    scale, inverse = scale_and_inverse(x, bits=bits)
    random = None
    if seed is not None:
        row = lax.broadcasted_iota(jnp.uint32, x.shape, 0)
        column = lax.broadcasted_iota(jnp.uint32, x.shape, 1)
        random = random_bits(row * x.shape[1] + column, seed[0], seed[1])
    integers = to_integers(x * inverse[:, None], random, bits=bits)
    values = packed(integers) if bits == 4 else integers
    return values.astype(jnp.int8), scale


@partial(jax.jit, static_argnames=("bits", "dtype", "num_cores"))
def dequantize(
    values: Int8[Array, "blocks width"],
    scales: Float32[Array, " blocks"],
    *,
    bits: int,
    dtype: Any,
    num_cores: int,
) -> Float[Array, "blocks block_size"]:
    """Blocks of numbers from what `quantize` made."""
    del num_cores
    integers = values.astype(jnp.int32)
    if bits == 4:
        integers = jnp.concatenate(unpacked(integers), axis=1)
    return (integers.astype(jnp.float32) * scales[:, None]).astype(dtype)
