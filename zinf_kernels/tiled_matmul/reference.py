"""What `matmul` means, in plain jnp: XLA has its own matmul and fuses the sums."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf_kernels.pieces import accumulator


def matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    bias: Float[Array, " n"] | None,
    residual: Float[Array, "m n"] | None,
    *,
    out_dtype: Any,
    num_cores: int,
) -> Float[Array, "m n"]:
    """The matmul in float32 or better, the sums too, and one rounding."""
    del num_cores
    out = jnp.matmul(a, b, preferred_element_type=accumulator(a.dtype))
    if bias is not None:
        out = out + bias[None, :].astype(out.dtype)
    if residual is not None:
        out = out + residual.astype(out.dtype)
    return out.astype(out_dtype)
