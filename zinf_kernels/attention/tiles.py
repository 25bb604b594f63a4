"""Cutting arrays of attention into blocks of tokens, and joining them again.

Shapes: see `blocks`.
"""

from typing import Any

import jax
import jax.numpy as jnp


def whole_tokens(num_tokens: int, size: int) -> int:
    """Tokens of enough blocks of a size."""
    return -(-num_tokens // size) * size


def cut_tokens(x: jax.Array, size: int, mode: str = "constant") -> jax.Array:
    """(B, T, ...) as (blocks, B, size, ...), padded."""
    short = -x.shape[1] % size
    if short:
        x = jnp.pad(x, ((0, 0), (0, short), *((0, 0),) * (x.ndim - 2)), mode=mode)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def split_heads(x: jax.Array, key_heads: int) -> jax.Array:
    """(I, B, Q, N, H) as (I, B, K, G, Q, H)."""
    x_IBQKGH = x.reshape(*x.shape[:3], key_heads, -1, x.shape[-1])
    return x_IBQKGH.transpose(0, 1, 3, 4, 2, 5)


def join_queries(x_IBKGQH: jax.Array, num_queries: int) -> jax.Array:
    """The inverse of `cut_tokens` and `split_heads`: (B, num_queries, N, H)."""
    x_BIQKGH = x_IBKGQH.transpose(1, 0, 4, 2, 3, 5)
    batch, count, size, key_heads, groups, width = x_BIQKGH.shape
    whole = x_BIQKGH.reshape(batch, count * size, key_heads * groups, width)
    return whole[:, :num_queries]


def join_keys(x_JBKCH: jax.Array, like: jax.Array) -> jax.Array:
    x_BJCKH = x_JBKCH.transpose(1, 0, 3, 2, 4)
    whole = x_BJCKH.reshape(like.shape[0], -1, *like.shape[2:])
    return whole[:, : like.shape[1]].astype(like.dtype)


def pad_tail(x: jax.Array, whole: tuple[int, int]) -> jax.Array:
    """The last two dims padded with zeros to whole blocks; dims of one stay."""
    dims = zip(whole, x.shape[-2:], strict=True)
    short = [size - now if now > 1 else 0 for size, now in dims]
    if not any(short):
        return x
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), *((0, n) for n in short)))


def by_group(x: jax.Array, key_heads: int) -> jax.Array:
    """(B, N or 1, ...) as (B, K or 1, G or 1, ...)."""
    heads = (1, 1) if x.shape[1] == 1 else (key_heads, -1)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def by_head(x: jax.Array, num_heads: int) -> jax.Array:
    return x.reshape(x.shape[0], num_heads, *x.shape[3:])


def read_piece(x: jax.Array, at: tuple[Any, Any], sizes: tuple[int, int]) -> jax.Array:
    """A piece of the last two dims, whole along those of one."""
    starts, shape = start_of(x, at), list(x.shape)
    shape[-2:] = [s if n > 1 else 1 for s, n in zip(sizes, x.shape[-2:], strict=True)]
    return jax.lax.dynamic_slice(x, starts, shape)


def add_piece(x: jax.Array, piece: jax.Array, at: tuple[Any, Any]) -> jax.Array:
    """Adds a piece, summed over the dims along which `x` has one element, to `x`."""
    old = read_piece(x, at, (piece.shape[-2], piece.shape[-1]))
    axes = tuple(d for d in range(x.ndim) if x.shape[d] == 1)
    new = old + piece.sum(axes, keepdims=True)
    return jax.lax.dynamic_update_slice(x, new, start_of(x, at))


def start_of(x: jax.Array, at: tuple[Any, Any]) -> tuple[Any, ...]:
    ends = [a if n > 1 else 0 for a, n in zip(at, x.shape[-2:], strict=True)]
    return tuple(jnp.int32(a) for a in ([0] * (x.ndim - 2) + ends))
