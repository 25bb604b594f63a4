"""Attention by jax's own Triton kernel, written in Pallas, for GPUs."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as pallas

from zinf_kernels.attention.spec import Operands, Spec

BLOCK = 128


def attention(spec: Spec, operands: Operands) -> jax.Array:
    """jax's `mha`, on whole blocks of tokens; see `rows.FUSED` for what it takes."""
    q, k, v = (operands[name] for name in "qkv")
    num_tokens, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    segments = operands.get("q_segments")
    if segments is not None:
        segments = jnp.broadcast_to(segments, q.shape[:2])
    short = -num_tokens % BLOCK
    if short:
        # Padded keys follow all causal queries, and else have a segment of their own.
        if segments is None and not spec.causal:
            segments = jnp.zeros(q.shape[:2], jnp.int32)
        q, k, v = (jnp.pad(x, ((0, 0), (0, short), (0, 0), (0, 0))) for x in (q, k, v))
        if segments is not None:
            padding = jnp.broadcast_to(segments.max() + 1, (q.shape[0], short))
            segments = jnp.concatenate([segments, padding], axis=1)
    out = pallas.mha(q, k, v, segments, sm_scale=spec.scale, causal=spec.causal)
    return out[:, :num_tokens]
