"""A layer whose attention joins examples and heads in one dim, as BLOOM's does."""

import jax
import jax.numpy as jnp

WIDTH = 4


def layer(p, x_BTD):
    """An attention with ALiBi, of one weight for queries, keys and values; an MLP."""
    count, length, dim = x_BTD.shape
    heads = dim // WIDTH
    qkv = (x_BTD @ p["qkv"] + p["bias"][None, None]).reshape(
        count, length, heads, 3, WIDTH
    )
    q, k, v = (
        qkv[..., n, :].swapaxes(1, 2).reshape(count * heads, length, WIDTH)
        for n in range(3)
    )
    slopes = 2.0 ** -jnp.arange(1.0, heads + 1)
    alibi = jnp.tile(
        slopes[:, None, None] * jnp.arange(length)[None, None], (count, 1, 1)
    )
    scores = alibi + WIDTH**-0.5 * jnp.einsum("ntd,nsd->nts", q, k)
    hidden = jnp.where(jnp.tri(length, dtype=bool), 0, -1e9)
    scores = scores.reshape(count, heads, length, length) + hidden[None, None]
    weights = jax.nn.softmax(scores).reshape(count * heads, length, length)
    y = jnp.einsum("nts,nsd->ntd", weights, v).reshape(count, heads, length, WIDTH)
    x_BTD = x_BTD + y.swapaxes(1, 2).reshape(count, length, dim) @ p["out"]
    return x_BTD + jnp.tanh(x_BTD @ p["up"]) @ p["down"]


def shapes(dim):
    """The shapes of a layer's weights."""
    hidden = 2 * dim
    wide = {"qkv": (dim, 3 * dim), "bias": (3 * dim,), "out": (dim, dim)}
    return wide | {"up": (dim, hidden), "down": (hidden, dim)}


DIMS = {"qkv": 1, "bias": 0, "out": 0, "up": 1, "down": 0}


def loss(p, batch):
    return jnp.mean(layer(p, batch["x"]) ** 2)
