"""Applies experts to the tokens that chose them, in blocks of one expert's rows.

No token is dropped here and none is computed in vain, for any expert function, on any
backend. `jax.lax.ragged_dot` fits matrix products only, and computes every expert for
every row on CPUs (`scripts/bench/bench_experts.py` compares). MegaBlocks
(https://arxiv.org/abs/2211.15841) has the idea, as block-sparse products on GPUs.

Shape suffixes:
  T  tokens            E  experts
  D  width of a token  N  routes: T * k, the choices of all tokens
  k  choices a token   P  places: routes sorted by expert, padded to whole blocks
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

DEFAULT_BLOCK = 128
ExpertFunction = Callable[[Any, jax.Array], jax.Array]


def experts(
    function: ExpertFunction,
    stacked_weights: Any,
    x: Float[Array, "tokens dim"],
    choice: Int[Array, "tokens k"],
    gate: Float[Array, "tokens k"],
    *,
    block: int | None = None,
    splits: int = 1,
) -> Float[Array, "tokens dim"]:
    """The sum over j of gate[t, j] * function(weights of choice[t, j], x[t]).

    Beside inputs, result and gradients it holds the values of one block of rows: the
    backward pass computes each block again. Sums over the choices of a token, and over
    the rows of an expert's gradient, are made in float32, always in the same order.

    Under a mesh the result is right for any sharding, but the loop is not divided:
    each device runs it for all tokens.

    Args:
        function: `function(weights_of_one, rows)`, from (block, dim) to (block, dim),
            each row by itself. It must not close over traced values: what it needs
            comes with `stacked_weights`.
        stacked_weights: a pytree of arrays whose dim 0 is the expert.
        x: one row for each token.
        choice: the experts of each token. A negative number is no expert: a dropped
            route, which adds nothing and costs nothing.
        gate: what each route is multiplied with.
        block: rows of one expert that are computed at once; 128 unless given, or fewer
            where an expert gets fewer on average. It changes the rounding of the
            gradients of weights, nothing else.
        splits: how many blocks of experts are computed one after another. Each is a
            piece of the program that reads the weights of its own experts alone, so
            that zinf streams experts which do not fit the device at once.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        ValueError: shapes that do not fit together, an expert that changes the width,
            or no expert at all.
    """
    arrays = jax.tree.map(jnp.asarray, (stacked_weights, x, choice, gate))
    stacked_weights, x, choice, gate = arrays
    num_experts = _check(function, stacked_weights, x, choice, gate, block)
    if block is None:
        block = default_block(choice.size, num_experts)
    if splits < 1 or num_experts % splits:
        raise ValueError(
            f"splits is {splits}; it must divide the {num_experts} experts evenly."
        )
    size = num_experts // splits
    total = jnp.zeros(x.shape, jnp.float32)
    for first in range(0, num_experts, size):
        own = _rows_of(stacked_weights, range(first, first + size))
        # An expert of another block becomes negative, or too large: no expert here.
        total += _experts(function, block, own, x, choice - first, gate)
    return total.astype(x.dtype)


def _rows_of(weights: Any, rows: range) -> Any:
    # Row by row: zinf makes each row that is read alone an array of its own, which has
    # a home and is fetched by itself (`zinf/segment/rows.py`).
    if len(rows) == jax.tree.leaves(weights)[0].shape[0]:
        return weights
    return jax.tree.map(lambda w: jnp.stack([w[i] for i in rows]), weights)


def default_block(num_routes: int, num_experts: int) -> int:
    """Rows of a block: a power of two near the mean number of an expert, at most 128.

    Each expert's rows are padded to whole blocks, so a block of many times their
    number would mostly compute padding.
    """
    mean = max(1, num_routes // num_experts)
    return min(DEFAULT_BLOCK, max(8, 1 << (mean - 1).bit_length()))


def _check(
    function: ExpertFunction,
    weights: Any,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
    block: int | None,
) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    if not leaves:
        raise ValueError(
            "stacked_weights has no array. Stack the weights of all experts along dim "
            "0, for example with jax.vmap(init)(keys)."
        )
    counts = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape[:1]
        for path, leaf in leaves
    }
    num_experts = sum(next(iter(counts.values())))
    if not num_experts or len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {sum(shape)}" for name, shape in counts.items())
        raise ValueError(
            "The leaves of stacked_weights must have the same dim 0, the number of "
            f"experts; found {found}. Stack the weights of all experts along dim 0."
        )
    if x.ndim != 2 or choice.ndim != 2 or choice.shape != gate.shape:
        raise ValueError(
            f"x is {x.shape}, choice {choice.shape} and gate {gate.shape}; they must "
            "be (tokens, dim), (tokens, k) and (tokens, k). Reshape (batch, time, dim) "
            "to (batch * time, dim)."
        )
    if choice.shape[0] != x.shape[0]:
        raise ValueError(
            f"choice is for {choice.shape[0]} tokens but x has {x.shape[0]}."
        )
    if not jnp.issubdtype(choice.dtype, jnp.signedinteger):
        raise ValueError(
            f"choice has dtype {choice.dtype}; it must be a signed integer, because a "
            "negative choice is a dropped route."
        )
    if block is not None and block < 1:
        raise ValueError(f"block is {block}; it must be at least 1 row.")
    one = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), weights)
    rows = jax.ShapeDtypeStruct((block or 1, x.shape[1]), x.dtype)
    result = jax.eval_shape(function, one, rows)
    if getattr(result, "shape", None) != rows.shape:
        raise ValueError(
            f"The expert turns rows of shape {rows.shape} into {result}. It must "
            "return an array of the same shape: results of experts are added up."
        )
    return num_experts


def _blocks(
    choice: jax.Array, num_experts: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Routes sorted by expert, each expert's padded to whole blocks.

    Returns:
        routes_P: the route in each place; N where there is none.
        owners: the expert of each block.
        total: how many blocks have a route; those behind are empty.
    """
    num_routes = choice.size
    flat_N = choice.reshape(-1)
    # What no expert has is sorted behind all experts, and given no place.
    is_expert = (flat_N >= 0) & (flat_N < num_experts)
    flat_N = jnp.where(is_expert, flat_N, num_experts).astype(jnp.int32)
    counts_E = jnp.zeros(num_experts + 1, jnp.int32).at[flat_N].add(1)[:num_experts]
    padded_E = -(-counts_E // block) * block
    ends_E = jnp.cumsum(padded_E, dtype=jnp.int32)
    order_N = jnp.argsort(flat_N, stable=True).astype(jnp.int32)
    owner_N = flat_N[order_N]
    known_N = jnp.minimum(owner_N, num_experts - 1)
    starts_E = jnp.cumsum(counts_E, dtype=jnp.int32) - counts_E
    rank_N = jnp.arange(num_routes, dtype=jnp.int32) - starts_E[known_N]
    # Each expert adds less than one block of padding.
    num_places = (num_routes // block + num_experts) * block
    place_N = jnp.where(
        owner_N < num_experts, (ends_E - padded_E)[known_N] + rank_N, num_places
    )
    routes_P = jnp.full(num_places, num_routes, jnp.int32)
    routes_P = routes_P.at[place_N].set(order_N, mode="drop")
    first_places = jnp.arange(num_places // block, dtype=jnp.int32) * block
    owners = jnp.searchsorted(ends_E, first_places, side="right").astype(jnp.int32)
    return routes_P, jnp.minimum(owners, num_experts - 1), ends_E[-1] // block


def _rows(array: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[index].get(mode="fill", fill_value=0)


def _one(weights: Any, expert: jax.Array) -> Any:
    return jax.tree.map(
        lambda w: jax.lax.dynamic_index_in_dim(w, expert, 0, keepdims=False), weights
    )


# Returns float32. The index of a route divided by k is its token; N // k is T, beyond
# all tokens.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(
    function: ExpertFunction,
    block: int,
    weights: Any,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
) -> jax.Array:
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    routes_P, owners, total = _blocks(choice, num_experts, block)
    k = choice.shape[1]

    def body(i: jax.Array, sum_TD: jax.Array) -> jax.Array:
        routes = jax.lax.dynamic_slice_in_dim(routes_P, i * block, block)
        rows = function(_one(weights, owners[i]), _rows(x, routes // k))
        gates = _rows(gate.reshape(-1), routes)[:, None].astype(jnp.float32)
        return sum_TD.at[routes // k].add(rows.astype(jnp.float32) * gates, mode="drop")

    zeros = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.fori_loop(0, total, body, zeros)


def _forward(
    function: ExpertFunction,
    block: int,
    weights: Any,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
) -> tuple[jax.Array, tuple]:
    result = _experts(function, block, weights, x, choice, gate)
    return result, (weights, x, choice, gate)


def _backward(
    function: ExpertFunction, block: int, saved: tuple, gradient_TD: jax.Array
) -> tuple:
    weights, x, choice, gate = saved
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    routes_P, owners, total = _blocks(choice, num_experts, block)
    k = choice.shape[1]

    def gated(weights: Any, rows: jax.Array, gates: jax.Array) -> jax.Array:
        result = function(weights, rows).astype(jnp.float32)
        return result * gates[:, None].astype(jnp.float32)

    def body(i: jax.Array, sums: tuple) -> tuple:
        weights_sum, x_sum, gate_N = sums
        routes = jax.lax.dynamic_slice_in_dim(routes_P, i * block, block)
        one, rows = _one(weights, owners[i]), _rows(x, routes // k)
        _, vjp = jax.vjp(gated, one, rows, _rows(gate.reshape(-1), routes))
        gradient = _rows(gradient_TD, routes // k)
        of_weights, of_rows, of_gates = vjp(gradient)
        weights_sum = jax.tree.map(
            lambda s, g: s.at[owners[i]].add(g.astype(s.dtype)), weights_sum, of_weights
        )
        x_sum = x_sum.at[routes // k].add(of_rows.astype(jnp.float32), mode="drop")
        gate_N = gate_N.at[routes].set(of_gates.astype(jnp.float32), mode="drop")
        return weights_sum, x_sum, gate_N

    def zeros(array: jax.Array) -> jax.Array:
        return jnp.zeros(array.shape, jnp.float32)

    start = jax.tree.map(zeros, weights), zeros(x), zeros(gate.reshape(-1))
    weights_sum, x_sum, gate_N = jax.lax.fori_loop(0, total, body, start)
    of_weights = jax.tree.map(lambda s, w: s.astype(w.dtype), weights_sum, weights)
    of_gate = gate_N.reshape(gate.shape).astype(gate.dtype)
    return of_weights, x_sum.astype(x.dtype), None, of_gate


_experts.defvjp(_forward, _backward)
