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

from zinf.moe.blocks import (
    ExpertFunction,
    gradients_of_blocks,
    row_of,
    sum_of_blocks,
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
    one = partial(row_of, weights)
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

    def of_one(own: Any, expert: jax.Array, rows: jax.Array) -> jax.Array:
        del expert
        return function(own, rows)

    rest = x, choice, gate, gradient_TD
    of_weights, of_x, of_gate = gradients_of_blocks(
        of_one, weights, num_experts, block, *rest
    )
    return of_weights, of_x, None, of_gate


in_blocks.defvjp(_forward, _backward)
