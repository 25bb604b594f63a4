"""Attention by cuDNN's fused kernels, through jax."""

import jax

from zinf_kernels.attention.spec import Operands, Spec


def attention(spec: Spec, operands: Operands) -> jax.Array:
    """`jax.nn.dot_product_attention` with cuDNN; see `rows.FUSED` for what it takes."""
    window = None if spec.window is None else (spec.window - 1, 0)
    return jax.nn.dot_product_attention(
        *(operands[name] for name in "qkv"),
        scale=spec.scale,
        is_causal=spec.causal,
        local_window_size=window,
        implementation="cudnn",
    )
