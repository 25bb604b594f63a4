"""Attention of `transformers` models, computed by jax.

`transformers` calls what is registered under `config._attn_implementation`. zinf
registers one function, which gives plain attention to `jax.nn.dot_product_attention`
(cuDNN on GPUs), and computes what that function lacks: soft caps (Gemma 2), sinks
(gpt-oss), dropout, and values of another width than keys (DeepSeek).
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import default_env
from torchax.interop import jax_view, torch_view
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "zinf"
_SEGMENTS: ContextVar[jax.Array | None] = ContextVar("segments", default=None)


def register() -> None:
    """Make the attention known to `transformers`; doing so again changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, boolean_mask)


@contextmanager
def within_segments(segment_ids: jax.Array | None) -> Generator[None, None, None]:
    """In the body no token sees one of another segment.

    Args:
        segment_ids: (batch, tokens); None: all tokens of a row are one sample's.
    """
    token = _SEGMENTS.set(segment_ids)
    try:
        yield
    finally:
        _SEGMENTS.reset(token)


def boolean_mask(**named: Any) -> torch.Tensor | None:
    """The mask of a layer, True where a query sees a key; None for a causal one."""
    # With a mask of padding, the choice would depend on its values.
    may_skip = named.pop("allow_is_causal_skip", True)
    segments = _SEGMENTS.get()
    may_skip = may_skip and named.get("attention_mask") is None and segments is None
    mask = sdpa_mask(**named, allow_is_causal_skip=may_skip)
    if segments is None or mask is None:
        return mask
    is_same = segments[:, None, :, None] == segments[:, None, None, :]
    return torch_view(jnp.logical_and(jax_view(mask), is_same))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the arguments and the result of `transformers`' own functions.

    Args:
        query, key, value: (batch, heads, tokens, width); keys and values may have fewer
            heads.
        attention_mask: booleans, True where a query sees a key, or numbers that are
            added to the scores.
        softcap: scores are `softcap * tanh(score / softcap)`.
        s_aux: a score per head that takes part in the softmax without a value.
        position_bias: numbers that are added to the scores.

    Returns:
        (batch, tokens, heads, width), and None for the weights.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    given = (query, key, value, attention_mask, s_aux, position_bias)
    q, k, v, mask, sinks, bias = (jax_view(x) for x in given)
    is_causal = is_causal and mask is None and q.shape[2] > 1
    if mask is not None and mask.dtype != jnp.bool_:
        bias, mask = mask if bias is None else mask + bias, None
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    is_plain = not dropout and softcap is None and sinks is None
    if is_plain and k.shape == v.shape:
        out_BTND = jax.nn.dot_product_attention(
            *(x.swapaxes(1, 2) for x in (q, k, v)),
            bias=bias,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
        )
        return torch_view(out_BTND), None
    if is_causal:
        mask = jnp.tri(q.shape[2], k.shape[2], dtype=bool)[None, None]
    key_of_dropout = default_env().get_and_rotate_prng_key() if dropout else None
    out_BTND = _general(
        q, k, v, mask, bias, scale, softcap, sinks, dropout, key_of_dropout
    )
    return torch_view(out_BTND), None


def _general(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
    dropout: float,
    dropout_key: jax.Array | None,
) -> jax.Array:
    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    scores = jnp.einsum("bntd,bnsd->bnts", q, k, preferred_element_type=jnp.float32)
    scores = scores * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        shape = (*scores.shape[:3], 1)
        sink = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), shape)
        scores = jnp.concatenate([scores, sink.astype(jnp.float32)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    if dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1.0 - dropout, weights.shape)
        weights = jnp.where(kept, weights / (1.0 - dropout), 0.0)
    return jnp.einsum("bnts,bnsd->btnd", weights.astype(v.dtype), v)
