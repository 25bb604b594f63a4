"""Attention by jax's splash kernel, written in Pallas, for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from zinf_kernels.attention.place import in_parts
from zinf_kernels.attention.spec import Operands, Spec, padded_segments

LANES = 128
BLOCK = 512


def attention(spec: Spec, operands: Operands) -> jax.Array:
    """jax's `make_splash_mha`, on whole blocks; see `rows.FUSED` for what it takes."""
    return in_parts(_attention, spec, operands)


def _attention(spec: Spec, operands: Operands) -> jax.Array:
    q, k, v = (operands[name] for name in "qkv")
    num_tokens, num_heads = q.shape[1:3]
    width = v.shape[3]
    # The kernel does not scale; scaling queries first is what its users do.
    q = (q.astype(jnp.float32) * spec.scale).astype(q.dtype)
    q, k, v = (_whole(x) for x in (q, k, v))
    size = q.shape[1]
    segments, short = None, size - num_tokens
    q_ids, k_ids = (padded_segments(spec, operands, short, of) for of in "qk")
    if q_ids is not None and k_ids is not None:
        segments = kernel.SegmentIds(q_ids, k_ids)
    run = kernel.make_splash_mha(
        masks.MultiHeadMask([_mask(spec, size)] * num_heads),
        block_sizes=_sizes(size),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=spec.soft_cap,
    )
    arrays = [x.swapaxes(1, 2) for x in (q, k, v)]
    given = arrays if segments is None else [*arrays, segments]
    out_BNTV: Any = jax.vmap(run)(*given)
    return out_BNTV.swapaxes(1, 2)[:, :num_tokens, :, :width]


def _mask(spec: Spec, size: int) -> Any:
    shape = size, size
    if spec.window is not None:
        after = 0 if spec.causal else spec.window - 1
        return masks.LocalMask(shape, (spec.window - 1, after), 0)
    return masks.CausalMask(shape) if spec.causal else masks.FullMask(shape)


def _whole(x: jax.Array) -> jax.Array:
    """Padded to whole blocks of tokens, and to whole lanes of width."""
    tokens = -x.shape[1] % LANES
    width = -x.shape[3] % LANES
    if not tokens and not width:
        return x
    return jnp.pad(x, ((0, 0), (0, tokens), (0, 0), (0, width)))


def _sizes(size: int) -> Any:
    """The largest blocks of up to `BLOCK` tokens that divide the sequence."""
    block = next(n for n in (BLOCK, 384, 256, LANES) if size % n == 0)
    return kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
