"""Blocks of one expert's rows, and the sum over experts that goes through them.

Shape suffixes:
  T  tokens            E  experts
  D  width of a token  N  routes: T * k, the choices of all tokens
  k  choices a token   P  places: routes sorted by expert, padded to whole blocks
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

ExpertFunction = Callable[[Any, jax.Array], jax.Array]


class Queues(NamedTuple):
    """Routes in the order of their experts, each expert's in the order of tokens.

    Attributes:
        order: the number of each route.
        owner: the expert of each route; the number of experts if it has none. Routes
            without an expert come last.
        rank: the place of each route in the queue of its expert.
        counts: the routes of each expert.
    """

    order: Int[Array, " N"]
    owner: Int[Array, " N"]
    rank: Int[Array, " N"]
    counts: Int[Array, " E"]


def queues(choice: Int[Array, "T k"], num_experts: int) -> Queues:
    """The queue of each expert; a choice out of range is no expert."""
    flat_N = choice.reshape(-1)
    # Routes without an expert are sorted behind all experts, and have no place.
    is_expert = (flat_N >= 0) & (flat_N < num_experts)
    flat_N = jnp.where(is_expert, flat_N, num_experts).astype(jnp.int32)
    counts_E = jnp.zeros(num_experts + 1, jnp.int32).at[flat_N].add(1)[:num_experts]
    order_N = jnp.argsort(flat_N, stable=True).astype(jnp.int32)
    owner_N = flat_N[order_N]
    starts_E = jnp.cumsum(counts_E, dtype=jnp.int32) - counts_E
    known_N = jnp.minimum(owner_N, num_experts - 1)
    rank_N = jnp.arange(choice.size, dtype=jnp.int32) - starts_E[known_N]
    return Queues(order_N, owner_N, rank_N, counts_E)


def blocks_of(
    choice: jax.Array, num_experts: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Routes sorted by expert, each expert's padded to whole blocks.

    Returns:
        routes_P: the route in each place; N where there is none.
        owners: the expert of each block.
        total: how many blocks have a route; those behind are empty.
    """
    num_routes = choice.size
    order_N, owner_N, rank_N, counts_E = queues(choice, num_experts)
    padded_E = -(-counts_E // block) * block
    ends_E = jnp.cumsum(padded_E, dtype=jnp.int32)
    known_N = jnp.minimum(owner_N, num_experts - 1)
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


def rows_at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by number; zeros for a number beyond the last row."""
    return array.at[index].get(mode="fill", fill_value=0)


def sum_of_blocks(
    function: ExpertFunction,
    weights_of: Callable[[jax.Array], Any],
    num_experts: int,
    block: int,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
) -> jax.Array:
    """`in_blocks`, with a function that finds the weights of one expert."""
    # The index of a route divided by k is its token; N // k is T, beyond all tokens.
    routes_P, owners, total = blocks_of(choice, num_experts, block)
    k = choice.shape[1]

    def body(i: jax.Array, sum_TD: jax.Array) -> jax.Array:
        routes = jax.lax.dynamic_slice_in_dim(routes_P, i * block, block)
        rows = function(weights_of(owners[i]), rows_at(x, routes // k))
        gates = rows_at(gate.reshape(-1), routes)[:, None].astype(jnp.float32)
        return sum_TD.at[routes // k].add(rows.astype(jnp.float32) * gates, mode="drop")

    zeros = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.fori_loop(0, total, body, zeros)


def gradients_of_blocks(
    function: Callable[[Any, jax.Array, jax.Array], jax.Array],
    weights: Any,
    num_experts: int,
    block: int,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
    gradient_TD: jax.Array,
) -> tuple[Any, jax.Array, jax.Array]:
    """The gradients of `sum_of_blocks`: of `weights`, of x and of gate.

    Each block is computed again.

    Args:
        function: `(row of weights, expert, rows) -> rows`.
        weights: a pytree of the arrays (E, ...) that get a gradient.
        gradient_TD: the gradient of the sum.
    """
    routes_P, owners, total = blocks_of(choice, num_experts, block)
    k = choice.shape[1]

    def body(i: jax.Array, sums: tuple) -> tuple:
        weights_sum, x_sum, gate_N = sums
        routes = jax.lax.dynamic_slice_in_dim(routes_P, i * block, block)
        one, rows = row_of(weights, owners[i]), rows_at(x, routes // k)

        def gated(weights: Any, rows: jax.Array, gates: jax.Array) -> jax.Array:
            result = function(weights, owners[i], rows).astype(jnp.float32)
            return result * gates[:, None].astype(jnp.float32)

        _, vjp = jax.vjp(gated, one, rows, rows_at(gate.reshape(-1), routes))
        gradient = rows_at(gradient_TD, routes // k)
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
    return of_weights, x_sum.astype(x.dtype), of_gate


def row_of(weights: Any, number: jax.Array) -> Any:
    """One row of each array of a pytree."""
    return jax.tree.map(
        lambda w: jax.lax.dynamic_index_in_dim(w, number, 0, keepdims=False), weights
    )
