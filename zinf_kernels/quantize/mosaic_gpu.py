"""`quantize` and `dequantize` for Hopper GPUs, a pass over memory each.

A row is a block: a warpgroup holds 64 of them in registers, four threads to a row, so
that the largest magnitude of a block takes two exchanges between neighbours.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int8, UInt32

from zinf_kernels.mosaic_stream import TILE_ROWS, stream
from zinf_kernels.quantize.blocks import pad
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
    num_blocks, block_size = x.shape
    x = pad(x, -num_blocks % TILE_ROWS)
    values = jax.ShapeDtypeStruct((len(x), block_size * bits // 8), jnp.int8)
    scales = jax.ShapeDtypeStruct((len(x),), jnp.float32)

    def compute(start: Any, seeds: Any, tiles: Any, results: Any) -> None:
        tile = tiles[0][...].astype(jnp.float32)
        scale, inverse = scale_and_inverse(tile, bits=bits)
        random = None
        if seed is not None:
            row = lax.broadcasted_iota(jnp.uint32, tile.shape, 0)
            row += start.astype(jnp.uint32)
            column = lax.broadcasted_iota(jnp.uint32, tile.shape, 1)
            random = random_bits(row * block_size + column, *seeds)
        scaled = tile * lax.broadcast_in_dim(inverse, tile.shape, (0,))
        integers = to_integers(scaled, random, bits=bits)
        integers = packed(integers) if bits == 4 else integers
        results[0][...] = integers.astype(jnp.int8)
        results[1][...] = scale

    made = stream(
        compute,
        (x,),
        () if seed is None else (seed,),
        results=(values, scales),
        num_cores=num_cores,
    )
    return made[0][:num_blocks], made[1][:num_blocks]


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
    num_blocks, width = values.shape
    padding = -num_blocks % TILE_ROWS
    arrays = pad(values, padding), pad(scales, padding)
    blocks = jax.ShapeDtypeStruct((len(arrays[0]), width * 8 // bits), dtype)

    def compute(start: Any, scalars: Any, tiles: Any, results: Any) -> None:
        del start, scalars
        integers = tiles[0][...].astype(jnp.int32)
        scale = lax.broadcast_in_dim(tiles[1][...], integers.shape, (0,))
        halves = unpacked(integers) if bits == 4 else (integers,)
        for i, half in enumerate(halves):
            numbers = (half.astype(jnp.float32) * scale).astype(dtype)
            results[0][:, i * width : (i + 1) * width] = numbers

    (made,) = stream(compute, arrays, results=(blocks,), num_cores=num_cores)
    return made[:num_blocks]
