"""`adam_update` for Hopper GPUs, one pass over memory.

16 bytes an element are read and 14 written, for some 40 instructions: the memory is
what takes time, and each array goes through it once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from zinf_kernels.adam_on_device.reference import without_subnormals
from zinf_kernels.mosaic_stream import ELEMENTS, stream

WIDTH = 128
TILE_NUMEL = WIDTH * ELEMENTS.rows
ONE = np.float32(1)
HALF = np.float32(0.5)
INFINITY = np.float32(np.inf)


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
    numel = master.size
    padding = -numel % TILE_NUMEL
    arrays = [
        (jnp.pad(a, (0, padding)) if padding else a).reshape(-1, WIDTH)
        for a in (master, m, v, gradient)
    ]
    dtypes = [master.dtype, m.dtype, v.dtype]
    dtypes += [] if copy_dtype is None else [copy_dtype]
    results = [jax.ShapeDtypeStruct(arrays[0].shape, dtype) for dtype in dtypes]
    made = stream(
        _update,
        arrays,
        (scalars,),
        results=results,
        tile=ELEMENTS,
        num_cores=num_cores,
    )
    new, new_m, new_v, *copy = (a.reshape(-1)[:numel] for a in made)
    return new, new_m, new_v, copy[0] if copy else None


def _update(start: Any, scalars: Any, tiles: Any, results: Any) -> None:
    del start
    rate, b1, rest1, correction1, b2, rest2, correction2, *others = scalars
    eps, eps_root, decay, factor = others
    master, m, v, gradient = (tile[...].astype(jnp.float32) for tile in tiles)
    g = gradient * factor
    new_m = without_subnormals(rest1 * g + b1 * m)
    new_v = without_subnormals(rest2 * (g * g) + b2 * v)
    root = _square_root(new_v * (ONE / correction2) + eps_root)
    change = new_m * (ONE / correction1) / (root + eps)
    # A decay of zero is no decay, even of an infinite parameter.
    has_decay = jnp.broadcast_to(decay, change.shape) != 0
    change = jnp.where(has_decay, change + decay * master, change)
    new = master - rate * change
    values = [new, new_m, new_v, new]
    for result, value in zip(results, values[: len(results)], strict=True):
        result[...] = value.astype(result.dtype)


def _square_root(x: Any) -> Any:
    """Within 1.6 units of rounding (2**-24), from an inverse root that is within 4.

    Mosaic has no square root. One Newton step on x * rsqrt(x) leaves the rounding of
    s * s, halved, and that of the last sum.
    """
    is_plain = (x > 0) & (x < INFINITY)
    safe = jnp.where(is_plain, x, ONE)
    inverse = lax.rsqrt(safe)
    s = safe * inverse
    s = s + HALF * inverse * (safe - s * s)
    return jnp.where(is_plain, s, x)
