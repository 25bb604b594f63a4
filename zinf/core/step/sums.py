"""Sums of gradients and cotangents on the devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.optim.squares import combined, squares
from zinf.core.segment.row_sums import add_rows
from zinf.core.sharding import Layout


def sum_dtype(dtype: Any) -> Any:
    """The dtype of sums of gradients of `dtype`: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def accumulated(
    total: jax.Array | None, part: jax.Array, *, is_wide: bool
) -> jax.Array:
    """The sum of `total` and `part`, in the memory of `total`, which is donated.

    Args:
        total: None begins a sum.
        is_wide: begin the sum in `sum_dtype`.
    """
    if total is not None:
        return _add(total, part)
    return part.astype(sum_dtype(part.dtype)) if is_wide else part


def accumulated_rows(
    total: jax.Array | None, rows: jax.Array, numbers: jax.Array, layout: Layout
) -> jax.Array:
    """Add rows to a total in `sum_dtype`.

    Args:
        total: None begins with zeros.
        rows: the rows to add.
        numbers: the row numbers in `total` where they are added.
        layout: the layout of `total`.
    """
    if total is None:
        dtype = sum_dtype(rows.dtype)
        total = jnp.zeros(layout.device_shape, dtype, device=layout.device)
    return add_rows(total, rows, numbers)


@jax.jit
def sum_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """The sum of the squares of all arrays, by [Note: wide sums of squares]."""
    return combined([squares(x) for x in arrays])


def _add_wide(total: jax.Array, part: jax.Array) -> jax.Array:
    return total + part.astype(total.dtype)


_add = jax.jit(_add_wide, donate_argnums=0)
