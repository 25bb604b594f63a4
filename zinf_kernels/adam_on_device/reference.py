"""What `adam_update` means, in plain jnp; XLA makes one pass of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


@partial(jax.jit, static_argnames=("copy_dtype", "num_cores"))
def adam_update(
    master: Float32[Array, " numel"],
    m: Float[Array, " numel"],
    v: Float32[Array, " numel"],
    gradient: Float[Array, " numel"],
    scalars: Float32[Array, "11"],
    *,
    copy_dtype: Any,
    num_cores: int,
) -> tuple[Array, Array, Array, Array | None]:
    """New master, m, v and copy."""
    del num_cores  # XLA cuts the work itself.
    rate, b1, rest1, correction1, b2, rest2, correction2, *others = scalars
    eps, eps_root, decay, factor = others
    g = gradient.astype(jnp.float32) * factor
    new_m = without_subnormals(rest1 * g + b1 * m.astype(jnp.float32))
    new_v = without_subnormals(rest2 * (g * g) + b2 * v)
    root = jnp.sqrt(new_v / correction2 + eps_root)
    change = new_m / correction1 / (root + eps)
    # A decay of zero is no decay, even of an infinite parameter.
    change = jnp.where(decay == 0, change, change + decay * master)
    new = master - rate * change
    copy = None if copy_dtype is None else new.astype(copy_dtype)
    return new, new_m.astype(m.dtype), new_v, copy


def without_subnormals(x: Any) -> Any:
    """`x`, NaNs too, but zero where it is below the normal numbers."""
    return jnp.where(jnp.abs(x) < SMALLEST_NORMAL, np.float32(0), x)
