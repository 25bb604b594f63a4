"""How a quantized array is laid out: `Quantized`, and the blocks it is made of."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

# Largest magnitude kept; symmetric, so that the negative of an array is kept as well.
LARGEST = {8: 127, 4: 7}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["shape", "dtype", "bits"],
)
@dataclass(frozen=True)
class Quantized:
    """An array as integers times a scale for each block of the flattened array.

    Attributes:
        values: [blocks, width]. With 8 bits a block's numbers in order; with 4 bits a
            byte holds number i of the block in its lower half and number
            block_size / 2 + i in its upper half, both as two's complement.
        scales: [blocks]; zero for a block of zeros, NaN for one with a NaN or infinity.
        shape: of the array. Blocks are cut from it in C order, and the last one is
            filled with zeros.
        dtype: of the array, and of what `dequantize` makes unless told otherwise.
        bits: 8 or 4.
    """

    values: Int8[Array, "blocks width"]
    scales: Float32[Array, " blocks"]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    bits: int

    @property
    def block_size(self) -> int:
        """Numbers in a block."""
        return self.values.shape[-1] * 8 // self.bits


def blocks_of(
    x: Float[Array, "..."], block_size: int
) -> Float[Array, "blocks block_size"]:
    """The array cut into rows, the last one filled up with zeros."""
    flat = x.reshape(-1)
    return pad(flat, -x.size % block_size).reshape(-1, block_size)


def array_of(blocks: Float[Array, "blocks block_size"], shape: tuple[int, ...]) -> Any:
    """The array of this shape that `blocks_of` cut into blocks."""
    return blocks.reshape(-1)[: prod(shape)].reshape(shape)


def pad(x: Array, rows: int) -> Array:
    """`x` with so many rows of zeros after it; `x` itself if there are none."""
    return jnp.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1)) if rows else x
