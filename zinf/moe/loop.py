"""The loop over blocks of one expert's rows: one device's part of `experts`.

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


def _one(weights: Any, expert: jax.Array) -> Any:
    return jax.tree.map(
        lambda w: jax.lax.dynamic_index_in_dim(w, expert, 0, keepdims=False), weights
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_blocks(
    function: ExpertFunction,
    block: int,
    weights: Any,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
) -> jax.Array:
    """`zinf.moe.experts` on one device, in float32."""
    # The index of a route divided by k is its token; N // k is T, beyond all tokens.
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    routes_P, owners, total = _blocks(choice, num_experts, block)
    k = choice.shape[1]

    def body(i: jax.Array, sum_TD: jax.Array) -> jax.Array:
        routes = jax.lax.dynamic_slice_in_dim(routes_P, i * block, block)
        rows = function(_one(weights, owners[i]), rows_at(x, routes // k))
        gates = rows_at(gate.reshape(-1), routes)[:, None].astype(jnp.float32)
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
    result = in_blocks(function, block, weights, x, choice, gate)
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
        one, rows = _one(weights, owners[i]), rows_at(x, routes // k)
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
    return of_weights, x_sum.astype(x.dtype), None, of_gate


in_blocks.defvjp(_forward, _backward)
