"""Loops over pieces of arrays that XLA updates in place, and matmuls with wide sums.

All functions work inside `jax.shard_map`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def for_pieces(
    total: int, size: int, body: Callable[[Any, int, Any], Any], carry: Any
) -> Any:
    """Folds `body(start, size, carry)` over all pieces of `range(total)`.

    The last piece is as short as it has to be and has a program of its own, so that
    nothing is padded or masked and every array is updated in place.
    """
    whole, rest = divmod(total, size)
    if whole == 1:
        carry = body(0, size, carry)
    elif whole:
        carry = lax.fori_loop(0, whole, lambda i, c: body(i * size, size, c), carry)
    return body(whole * size, rest, carry) if rest else carry


def part(x: Array, start: Any, size: int, axis: int = 0) -> Array:
    """A piece of `x` along an axis."""
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def put(x: Array, piece: Array, start: Any, axis: int = 0) -> Array:
    """`x` with a piece along an axis replaced."""
    return lax.dynamic_update_slice_in_dim(x, piece, start, axis)


def accumulator(dtype: Any) -> Any:
    """The dtype in which sums over many terms are kept: float32, or float64 of that."""
    return jnp.promote_types(dtype, jnp.float32)


def matmul(one: Array, other: Array, contracted: tuple[int, int]) -> Array:
    """The matmul of two matrices along an axis of each, in the dtype of its sums."""
    a, b = contracted
    dimensions = (((a,), (b,)), ((), ()))
    wide = accumulator(one.dtype)
    return lax.dot_general(one, other, dimensions, preferred_element_type=wide)


def varying_as(x: Array, *likes: Array) -> Array:
    """`x` marked as different on the devices on which `likes` may be, in shard_map.

    The carry of a loop has to be marked from the start. The transpose of marking is a
    sum over devices, which the gradient of a replicated weight needs.
    """
    wanted = frozenset().union(*map(_varying, likes))
    axes = tuple(wanted - _varying(x))
    return lax.pcast(x, axes, to="varying") if axes else x


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
