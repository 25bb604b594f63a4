"""The sum over experts as one equation of a trace; see `zinf/core/jaxpr/chosen.py`.

The equation computes what `in_blocks` does, in the same order. Its weights may be those
of all experts, or lie in slots that hold only some of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend

from zinf.core.jaxpr.chosen import CHOSEN_EXPERTS
from zinf.core.jaxpr.compat import new_operation
from zinf.moe.blocks import ExpertFunction, sum_of_blocks


def sum_of_chosen(
    function: ExpertFunction,
    block: int,
    weights: Any,
    x: jax.Array,
    choice: jax.Array,
    gate: jax.Array,
) -> jax.Array:
    """`in_blocks`, as one equation."""
    leaves, structure = jax.tree.flatten(weights)

    def flat(own: Sequence[Any], rows: jax.Array) -> jax.Array:
        return function(jax.tree.unflatten(structure, own), rows)

    one = [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in leaves]
    rows = jax.ShapeDtypeStruct((block, x.shape[1]), x.dtype)
    return chosen_p.bind(
        choice,
        x,
        gate,
        *leaves,
        expert=jax.make_jaxpr(flat)(one, rows),
        block=block,
        num_experts=leaves[0].shape[0],
        in_slots=(False,) * len(leaves),
    )


def _compute(
    choice: jax.Array,
    x: jax.Array,
    gate: jax.Array,
    *arrays: jax.Array,
    expert: Any,
    block: int,
    num_experts: int,
    in_slots: tuple[bool, ...],
) -> jax.Array:
    """The equation.

    Args:
        arrays: the slot of each expert, (E,), if some weights lie in slots; weights.
        expert: `(weights of one, rows) -> rows`, as a jaxpr.
        in_slots: for each weight, whether its leading dim is a slot, not an expert.
    """
    weights, slot_E = list(arrays), None
    if any(in_slots):
        slot_E = weights.pop(0)
    function = jax.extend.core.jaxpr_as_fun(expert)

    def weights_of(number: jax.Array) -> list[jax.Array]:
        slot = number if slot_E is None else slot_E[number]
        places = [slot if is_in_slot else number for is_in_slot in in_slots]
        return [
            jax.lax.dynamic_index_in_dim(w, place, 0, keepdims=False)
            for w, place in zip(weights, places, strict=True)
        ]

    def rows_of(own: Sequence[Any], rows: jax.Array) -> jax.Array:
        return function(*own, rows)[0]

    return sum_of_blocks(rows_of, weights_of, num_experts, block, x, choice, gate)


def _result(choice: Any, x: Any, *_: Any, **__: Any) -> Any:
    del choice
    return x.update(dtype="float32", weak_type=False)


chosen_p = new_operation(CHOSEN_EXPERTS, _compute, _result)
