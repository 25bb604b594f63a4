"""What `adam_update` means, in plain jnp and in the order of optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_kernels.adam.arguments import Arrays, Scalars


def adam_update(arrays: Arrays, scalars: Scalars, *, num_threads: int | None) -> None:
    """Computes new arrays and copies them over the old ones."""
    del num_threads  # XLA has threads of its own.
    old = arrays.master, arrays.m, arrays.v, arrays.gradient
    master, m, v = map(np.asarray, _updated(*old, vars(scalars)))
    arrays.master[:] = master
    arrays.m[:] = m
    arrays.v[:] = v
    if arrays.copy is not None:
        arrays.copy[:] = master.astype(arrays.copy.dtype)


@jax.jit
def _updated(
    master: Any, m: Any, v: Any, gradient: Any, s: dict[str, Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    gradient = gradient.astype(jnp.float32) * s["factor"]
    new_m = s["one_minus_b1"] * gradient + s["b1"] * m.astype(jnp.float32)
    new_v = s["one_minus_b2"] * (gradient * gradient) + s["b2"] * v
    m_hat = new_m / s["correction1"]
    v_hat = new_v / s["correction2"]
    change = m_hat / (jnp.sqrt(v_hat + s["eps_root"]) + s["eps"])
    # 0 * inf is NaN: with a decay of zero the product is left out.
    decay = s["weight_decay"]
    change = jnp.where(decay == 0, change, change + decay * master)
    return master - s["learning_rate"] * change, new_m.astype(m.dtype), new_v
