"""The loop over blocks of one expert's rows: one device's part of `experts`.

No token is dropped here and none is computed in vain, for any expert function, on any
backend. `jax.lax.ragged_dot` fits matrix products only, and computes every expert for
every row on CPUs (`scripts/bench/bench_experts.py` compares). MegaBlocks
(https://arxiv.org/abs/2211.15841) has the idea, as block-sparse products on GPUs.

The shape suffixes are those of `zinf/moe/blocks.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.jaxpr.chosen import is_on_demand
from zinf.moe.blocks import ExpertFunction, blocks_of, rows_at, sum_of_blocks
from zinf.moe.chosen import sum_of_chosen


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
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    if is_on_demand(num_experts, choice.shape[1], choice.shape[0]):
        return sum_of_chosen(function, block, weights, x, choice, gate)
    one = partial(_one, weights)
    return sum_of_blocks(function, one, num_experts, block, x, choice, gate)


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
    routes_P, owners, total = blocks_of(choice, num_experts, block)
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
