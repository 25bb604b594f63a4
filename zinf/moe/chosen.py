"""The sum over experts as one equation of a trace; see `zinf/core/jaxpr/chosen.py`.

The equation computes what `in_blocks` does, in the same order. Its weights may be those
of all experts, or lie in slots that hold only some of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend

from zinf.core.jaxpr.chosen import CHOSEN_EXPERTS, NUM_OPERANDS
from zinf.core.jaxpr.compat import new_operation
from zinf.moe.blocks import (
    ExpertFunction,
    gradients_of_blocks,
    row_of,
    sum_of_blocks,
)


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
    weights_of = _weights_of(arrays, in_slots)
    function = jax.extend.core.jaxpr_as_fun(expert)

    def rows_of(own: Sequence[Any], rows: jax.Array) -> jax.Array:
        return function(*own, rows)[0]

    return sum_of_blocks(rows_of, weights_of, num_experts, block, x, choice, gate)


def _weights_of(
    arrays: Sequence[jax.Array], in_slots: tuple[bool, ...]
) -> Callable[[jax.Array], list[jax.Array]]:
    """What finds the weights of one expert; see `_compute`."""
    weights, slot_E = list(arrays), None
    if any(in_slots):
        slot_E = weights.pop(0)

    def weights_of(number: jax.Array) -> list[jax.Array]:
        slot = number if slot_E is None else slot_E[number]
        pairs = zip(weights, in_slots, strict=True)
        return [row_of(w, slot if is_in_slot else number) for w, is_in_slot in pairs]

    return weights_of


def _gradients(
    gradient_TD: jax.Array,
    choice: jax.Array,
    x: jax.Array,
    gate: jax.Array,
    *arrays: jax.Array,
    needed: tuple[bool, ...],
    expert: Any,
    block: int,
    num_experts: int,
    in_slots: tuple[bool, ...],
) -> list[jax.Array]:
    """The gradients of the operands that are `needed`: `choice` and slots never are."""
    weights_of = _weights_of(arrays, in_slots)
    function = jax.extend.core.jaxpr_as_fun(expert)
    flags = needed[len(needed) - len(in_slots) :]
    assert not any(n and s for n, s in zip(flags, in_slots, strict=True))
    weights = arrays[len(arrays) - len(flags) :]
    trained = [w for w, is_needed in zip(weights, flags, strict=True) if is_needed]

    def of_one(own: Sequence[Any], number: jax.Array, rows: jax.Array) -> jax.Array:
        rest = iter(own)
        pairs = zip(weights_of(number), flags, strict=True)
        merged = [next(rest) if is_needed else w for w, is_needed in pairs]
        return function(*merged, rows)[0]

    of_weights, of_x, of_gate = gradients_of_blocks(
        of_one, trained, num_experts, block, x, choice, gate, gradient_TD
    )
    _, needs_x, needs_gate = needed[:NUM_OPERANDS]
    return [*[of_x] * needs_x, *[of_gate] * needs_gate, *of_weights]


def _result(choice: Any, x: Any, *_: Any, **__: Any) -> Any:
    del choice
    return x.update(dtype="float32", weak_type=False)


chosen_p = new_operation(CHOSEN_EXPERTS, _compute, _result, _gradients)
