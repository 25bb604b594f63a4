"""The first layer of a language model from tiles of words, as its last one has them."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def embed(
    tiles: Sequence[Float[Array, "words dim"]], tokens: Int[Array, "*batch"]
) -> Float[Array, "*batch dim"]:
    """The vectors of tokens, of which each tile gives those that it has.

    To the bit what one look-up gives, forward and backward: a row's gradient is summed
    within its tile, in the order of tokens. Tokens that no tile has get NaN.

    Args:
        tiles: `split(table, n, axis=0)`.
        tokens: integers from zero up to the number of all rows.
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
