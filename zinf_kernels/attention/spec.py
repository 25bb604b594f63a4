"""What an attention computes: its arrays, and the settings that are no arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_kernels.attention.place import Place

# Arrays besides query, key and value, in the order of the equation's operands, and what
# an attention with them has besides causality, in words.
OPTIONAL: Mapping[str, str] = MappingProxyType(
    {
        "q_segments": "segments",
        "k_segments": "segments",
        "q_positions": "positions",
        "k_positions": "positions",
        "mask": "a mask",
        "bias": "a bias",
        "sinks": "sinks",
        "dropout_key": "dropout",
    }
)
Operands = Mapping[str, Any]
"""Arrays by name: `q`, `k`, `v`, and those of `OPTIONAL` that are given."""


@dataclass(frozen=True)
class Spec:
    """The settings of an attention that are no arrays.

    Attributes:
        implementation: the row that computes it.
        scale: factor of the scores.
        causal: a query sees no key at a later position.
        window: a query sees keys at positions nearer than this; None: all.
        soft_cap: scores are `soft_cap * tanh(score / soft_cap)`.
        dropout: share of the weights that are set to zero.
        keys_apart: keys have segments of their own, and not those of the queries at
            their places.
        place: what it runs on; None: not known.
    """

    scale: float
    implementation: str = "blocks"
    causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    keys_apart: bool = False
    place: Place | None = None


def shape_of(operands: Operands) -> tuple[int, int, int, int, int, int, int]:
    """(B, T, S, N, K, H, V): batch, queries, keys, their heads, and both widths."""
    q, k, v = operands["q"].shape, operands["k"].shape, operands["v"].shape
    return q[0], q[1], k[1], q[2], k[2], q[3], v[3]


def positions(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(B or 1, T) and (B or 1, S), int32. Without given ones tokens count from 0."""
    _, num_queries, num_keys, *_ = shape_of(operands)
    q_BT = operands.get("q_positions", jnp.arange(num_queries, dtype=jnp.int32)[None])
    k_BS = operands.get("k_positions", jnp.arange(num_keys, dtype=jnp.int32)[None])
    return q_BT, k_BS


def is_seen(spec: Spec, operands: Operands) -> jax.Array | None:
    """Which keys each query sees, (B or 1, N or 1, T, S); None: it sees all."""
    pairs = visible(
        spec,
        *positions(operands),
        operands.get("q_segments"),
        operands.get("k_segments"),
    )
    parts = [None if pairs is None else pairs[:, None], operands.get("mask")]
    given = [part for part in parts if part is not None]
    if not given:
        return None
    return given[0] if len(given) == 1 else jnp.logical_and(*given)


def visible(
    spec: Spec,
    q_positions: jax.Array,
    k_positions: jax.Array,
    q_segments: jax.Array | None,
    k_segments: jax.Array | None,
) -> jax.Array | None:
    """Which keys positions and segments let each query see; None: they hide none.

    Args:
        q_positions: (..., T); q_segments: the same.
        k_positions: (..., S); k_segments: the same.

    Returns:
        (..., T, S), broadcast.
    """
    seen = None
    distance = q_positions[..., :, None] - k_positions[..., None, :]
    if spec.causal:
        seen = distance >= 0
    if spec.window is not None:
        near = distance < spec.window
        if not spec.causal:
            near = jnp.logical_and(near, distance > -spec.window)
        seen = near if seen is None else jnp.logical_and(seen, near)
    if q_segments is not None and k_segments is not None:
        same = q_segments[..., :, None] == k_segments[..., None, :]
        seen = same if seen is None else jnp.logical_and(seen, same)
    return seen


def padded_segments(
    spec: Spec, operands: Operands, short: int, of: str = "q"
) -> jax.Array | None:
    """Segments of tokens and of `short` padded ones, (B, T + short); None: not needed.

    For kernels that take as many queries as keys. Padding has a segment of its own; it
    needs none after causal queries, which never see it.

    Args:
        of: "q" or "k", the tokens whose segments these are.
    """
    batch, num_tokens, *_ = operands["q"].shape
    ids = operands.get(f"{of}_segments")
    if ids is None:
        if spec.causal or not short:
            return None
        ids = jnp.zeros((1, num_tokens), jnp.int32)
    largest = operands.get("q_segments", ids).max()
    ids = jnp.broadcast_to(ids, (batch, num_tokens))
    padding = jnp.broadcast_to(largest + 1, (batch, short))
    return jnp.concatenate([ids, padding], axis=1)


def score_dtype(dtype: Any) -> np.dtype:
    """The dtype of scores and of sums over keys: float32, float64 for float64."""
    return np.dtype(jnp.promote_types(dtype, jnp.float32))


def score_bytes(operands: Operands) -> int:
    """Bytes of all scores, which `xla` holds at once."""
    batch, num_queries, num_keys, num_heads, *_ = shape_of(operands)
    itemsize = score_dtype(operands["q"].dtype).itemsize
    return batch * num_heads * num_queries * num_keys * itemsize
