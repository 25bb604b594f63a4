"""Attention by jax's own Triton kernel, written in Pallas, for GPUs."""

import warnings

import jax
import jax.numpy as jnp

from zinf_kernels.attention.place import in_parts
from zinf_kernels.attention.spec import Operands, Spec, padded_segments

with warnings.catch_warnings():
    # jax 0.12 names another package in its place.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as pallas

BLOCK = 128


def attention(spec: Spec, operands: Operands) -> jax.Array:
    """jax's `mha`, on whole blocks of tokens; see `rows.FUSED` for what it takes."""
    return in_parts(_attention, spec, operands)


def _attention(spec: Spec, operands: Operands) -> jax.Array:
    q, k, v = (operands[name] for name in "qkv")
    num_tokens, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    short = -num_tokens % BLOCK
    segments = padded_segments(spec, operands, short)
    if short:
        q, k, v = (jnp.pad(x, ((0, 0), (0, short), (0, 0), (0, 0))) for x in (q, k, v))
    out = pallas.mha(q, k, v, segments, sm_scale=spec.scale, causal=spec.causal)
    return out[:, :num_tokens]
