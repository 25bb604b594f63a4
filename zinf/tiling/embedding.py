"""The embedding of a language model, from a table that is cut into tiles of words."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def embed(
    tiles: Sequence[Float[Array, "words dim"]], tokens: Int[Array, "*batch"]
) -> Float[Array, "*batch dim"]:
    """The vectors of tokens, each from the tile that has its row.

    Bit-equal to a look-up in the whole table, forward and backward: a row's gradient is
    summed within its tile, in the order of tokens. Tokens that no tile has get NaN.

    Args:
        tiles: `split(table, n, axis=0)`.
        tokens: integers from zero to the number of rows of all tiles, exclusive.
    """
    dim, first = tiles[0].shape[1], 0
    made = jnp.full((*tokens.shape, dim), jnp.nan, tiles[0].dtype)
    for tile in tiles:
        inside = (tokens >= first) & (tokens < first + len(tile))
        row = jnp.where(inside, tokens - first, len(tile))
        vectors = tile.at[row].get(mode="fill", fill_value=0)
        made = jnp.where(inside[..., None], vectors, made)
        first += len(tile)
    return made
