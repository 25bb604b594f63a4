"""Attention by XLA, which holds all scores: jax's own where it has the feature."""

import jax
import jax.numpy as jnp

from zinf_kernels.attention import reference
from zinf_kernels.attention.spec import Operands, Spec, is_seen


def attention(spec: Spec, operands: Operands) -> jax.Array:
    """`jax.nn.dot_product_attention`, or the reference with what that one lacks."""
    q, k, v = (operands[name] for name in "qkv")
    lacks = spec.dropout or spec.soft_cap is not None or "sinks" in operands
    # jax's asks for products of float16 that CPUs do not have.
    if lacks or k.shape != v.shape or q.dtype == jnp.float16:
        return reference.attention(spec, operands)
    is_plain = spec.causal and spec.window is None and q.shape[1] == k.shape[1]
    is_plain = is_plain and not operands.keys() & {"q_segments", "mask", "q_positions"}
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=operands.get("bias"),
        mask=None if is_plain else is_seen(spec, operands),
        scale=spec.scale,
        is_causal=is_plain,
        implementation="xla",
    )
