"""Runs functions of independent rows on some rows at a time.

Arctic Long Sequence Training (arXiv:2506.13996, section 3.1) tiles activations of long
sequences in this way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from zinf_kernels.pieces import accumulator, for_pieces, part, put, varying_as

RowFunction = Callable[[Any, Array], Array]


def over_rows(
    function: RowFunction,
    params: PyTree[Float[Array, "..."]],
    x: Float[Array, "..."],
    *,
    tile_rows: int,
    axis: int = -2,
) -> Float[Array, "..."]:
    """`function(params, x)`, on at most `tile_rows` rows at a time, in sequence.

    The intermediate values of the function exist for one tile at a time, forward and
    backward: the backward pass keeps only `params` and `x`, and recomputes each tile.
    Gradients by `params` are summed over tiles in float32 (float64 of float64) and
    rounded once. Differentiable in reverse.

    On a mesh do not shard `axis`, because XLA would gather it: shard another one, such
    as the batch. Or call it in `jax.shard_map`.

    Args:
        function: takes `params` and some rows of `x`, and returns as many rows. No row
            may depend on others. It must not close over values that are traced.
        params: floating-point arrays.
        x: is cut along `axis`.
        axis: of `x` and of the result; by default that of the sequence.

    Raises:
        ValueError: `tile_rows` is not positive, something in `params` is not floating
            point, or the function does not return a row for each row.
    """
    if tile_rows < 1:
        raise ValueError(f"tile_rows is {tile_rows}. Pass at least 1.")
    for leaf in jax.tree.leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"There is an array of {leaf.dtype} in params. What is not trained "
                "would be the same for each tile: make it within the function."
            )
    out = jax.eval_shape(function, params, x)
    if not -out.ndim <= axis < out.ndim or out.shape[axis] != x.shape[axis]:
        raise ValueError(
            f"The function makes {out.shape} of {x.shape}: not a row for each row "
            f"along axis {axis}."
        )
    leaves = *jax.tree.leaves(params), x
    params, x = jax.tree.map(lambda a: varying_as(a, *leaves), (params, x))
    return _over_rows(_Tiled(function, tile_rows, axis), params, x)


@dataclass(frozen=True)
class _Tiled:
    function: RowFunction
    rows: int
    axis: int

    def fold(self, x: Array, body: Callable[..., Any], carry: Any) -> Any:
        return for_pieces(x.shape[self.axis], self.rows, body, carry)

    def part(self, x: Array, start: Any, size: int) -> Array:
        return part(x, start, size, self.axis % x.ndim)

    def put(self, x: Array, piece: Array, start: Any) -> Array:
        return put(x, piece, start, self.axis % x.ndim)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_rows(tiled: _Tiled, params: Any, x: Array) -> Array:
    out = jax.eval_shape(tiled.function, params, x)

    def body(start: Any, size: int, made: Array) -> Array:
        rows = tiled.function(params, tiled.part(x, start, size))
        return tiled.put(made, rows, start)

    return tiled.fold(x, body, varying_as(jnp.zeros(out.shape, out.dtype), x))


def _forward(tiled: _Tiled, params: Any, x: Array) -> Any:
    return _over_rows(tiled, params, x), (params, x)


def _backward(tiled: _Tiled, kept: Any, by_out: Array) -> Any:
    params, x = kept

    def zeros(a: Array, dtype: Any) -> Array:
        return varying_as(jnp.zeros(a.shape, dtype), x)

    def body(start: Any, size: int, sums: Any) -> Any:
        by_params, by_x = sums
        mine = params, tiled.part(x, start, size), tiled.part(by_out, start, size)
        # Without the barrier XLA may keep values of the forward pass in place of
        # recomputing.
        given, rows, by_rows = jax.lax.optimization_barrier(mine)
        more, by_some = jax.vjp(tiled.function, given, rows)[1](by_rows)
        by_params = jax.tree.map(lambda a, b: a + b.astype(a.dtype), by_params, more)
        return by_params, tiled.put(by_x, by_some, start)

    wide = jax.tree.map(lambda a: zeros(a, accumulator(a.dtype)), params)
    by_params, by_x = tiled.fold(x, body, (wide, zeros(x, x.dtype)))
    return jax.tree.map(lambda a, b: a.astype(b.dtype), by_params, params), by_x


_over_rows.defvjp(_forward, _backward)
