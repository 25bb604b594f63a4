"""Cuts arrays into tiles, and joins and sums tiles."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from zinf_kernels.pieces import accumulator


def sizes(total: int, num_tiles: int) -> tuple[int, ...]:
    """Lengths of the tiles of an axis: as equal as they can be, the longer ones first.

    Raises:
        ValueError: there would be no tile, or an empty one.
    """
    if not 1 <= num_tiles <= max(total, 1):
        raise ValueError(
            f"An axis of {total} cannot be cut into {num_tiles} tiles. Pass a number "
            f"from 1 to {max(total, 1)}."
        )
    length, longer = divmod(total, num_tiles)
    return tuple(length + (i < longer) for i in range(num_tiles))


def split(x: Array, num_tiles: int, *, axis: int = -1) -> tuple[Array, ...]:
    """Tiles of `x` along an axis, of the lengths that `sizes` says."""
    return cut(x, sizes(x.shape[axis], num_tiles), axis=axis)


def cut(x: Array, lengths: Sequence[int], *, axis: int = -1) -> tuple[Array, ...]:
    """Tiles of `x` of these lengths along an axis."""
    return tuple(lax.split(x, lengths, axis % x.ndim))


def join(tiles: Sequence[Array], *, axis: int = -1) -> Array:
    """The array that was `split`."""
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=axis)


def shared(x: Array, num_readers: int) -> Array:
    """`x` widened, for several tiles that read it and convert it back to its dtype.

    Its gradient is the sum over these tiles. Widened, it is summed in float32 and
    rounded once; in bfloat16 it would be rounded for every tile.
    """
    return x.astype(accumulator(x.dtype)) if num_readers > 1 else x


def plus(total: Array, term: Array) -> Array:
    """Their sum in float32, or float64 of float64."""
    wide: Any = accumulator(total.dtype)
    return total.astype(wide) + term.astype(wide)
