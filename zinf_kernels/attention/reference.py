"""Attention by its formula, with all scores at once."""

import jax
import jax.numpy as jnp

from zinf_kernels.attention.spec import Operands, Spec, is_seen, score_dtype


def attention(spec: Spec, operands: Operands) -> jax.Array:
    """softmax(scores) v, in plain jnp; see `attention` of the folder."""
    q_BTNH, k_BSKH, v_BSKV = (operands[name] for name in "qkv")
    groups = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNV = (jnp.repeat(x, groups, axis=2) for x in (k_BSKH, v_BSKV))
    wide = score_dtype(q_BTNH.dtype)
    scores = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH, preferred_element_type=wide)
    scores = scores * spec.scale
    if spec.soft_cap is not None:
        scores = jnp.tanh(scores / spec.soft_cap) * spec.soft_cap
    if "bias" in operands:
        scores = scores + operands["bias"].astype(wide)
    seen = is_seen(spec, operands)
    if seen is not None:
        scores = jnp.where(seen, scores, jnp.finfo(wide).min)
    weights = _softmax(scores, operands.get("sinks"))
    if spec.dropout:
        kept = jax.random.bernoulli(
            operands["dropout_key"], 1.0 - spec.dropout, weights.shape
        )
        weights = jnp.where(kept, weights / (1.0 - spec.dropout), 0.0)
    return jnp.einsum("bnts,bsnv->btnv", weights.astype(v_BSNV.dtype), v_BSNV)


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Over keys; a sink is one more score of each row, without a value."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    shape = (*scores.shape[:3], 1)
    column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), shape).astype(scores.dtype)
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
