"""What `matmul` means, in plain jnp: XLA has its own product, and fuses the rest."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from zinf_kernels.tiled_matmul.epilogue import Epilogue


def matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    bias: Float[Array, " n"] | None,
    residual: Float[Array, "m n"] | None,
    *,
    epilogue: Epilogue,
    num_cores: int,
) -> Float[Array, "m n"]:
    """The product in float32 or better, and what comes after it."""
    del num_cores
    wide: Any = jnp.promote_types(a.dtype, jnp.float32)
    product = jnp.matmul(a, b, preferred_element_type=wide)
    bias = None if bias is None else bias[None, :]
    return epilogue(product, bias, residual)
