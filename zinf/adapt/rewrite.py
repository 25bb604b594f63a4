"""Evaluates the jaxpr of a loss with adapted weights in the place of some parameters.

A product of an activation and an adapted weight becomes two: with the frozen weight,
and with the two thin factors one after the other. So no gradient of the weight's own
size is made. Any other use computes the merged weight just before it. Both are where
the loss uses the weight, so that zinf's segments stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax

from zinf.adapt.contraction import is_row
from zinf.adapt.weight import (
    LORA_A,
    LORA_B,
    ROW,
    Target,
    Weight,
    arranged,
    frozen_view,
    gain,
    lead_left,
    merged_view,
    scaled,
    step,
)
from zinf.core.jaxpr.chosen import CHOSEN_EXPERTS, NUM_OPERANDS
from zinf.core.jaxpr.dims import union, viewed
from zinf.core.jaxpr.primitives import CASTS
from zinf.core.jaxpr.walk import Evaluator, apply, with_dtype
from zinf.moe.chosen import sum_of_chosen


class Rewriter(Evaluator):
    """Evaluates jaxprs on values of which some are `Weight`s.

    Args:
        dropout: share of an adapter's inputs that is dropped.
        key: for dropout; None: nothing is dropped.
    """

    def __init__(self, dropout: float, key: Any) -> None:
        self.dropout, self.key = dropout, key
        self.num_sites = 0

    def stands_for_array(self, value: Any) -> bool:
        return isinstance(value, Weight)

    def as_array(self, value: Any) -> Any:
        """A weight merged; any other value itself."""
        return merged_view(value) if isinstance(value, Weight) else value

    def as_rows(self, value: Any) -> Any:
        """A stacked weight, of which each row is a weight."""
        if not isinstance(value, Weight):
            return value
        if not value.is_row or value.taken == value.target.contraction.stack:
            return self.as_array(value)
        taken = value.taken + 1
        return replace(value, taken=taken, dims=value.dims[1:], steps=value.casts)

    def visit(self, equation: Any, values: list[Any]) -> list[Any]:
        name, result = equation.primitive.name, None
        if name == CHOSEN_EXPERTS:
            return [self.experts(equation, values)]
        if isinstance(values[0], Weight):
            result = view(equation, values)
        if name == "dot_general" and sum(isinstance(x, Weight) for x in values) == 1:
            result = self.dot(equation, values)
        if name == "ragged_dot_general" and isinstance(values[1], Weight):
            result = self.ragged_dot(equation, values)
        if result is None:
            return apply(equation, [self.as_array(x) for x in values])
        return [result]

    def dot(self, equation: Any, values: list[Any]) -> Any:
        """x @ weight plus the adapter's product; None if the dims do not fit."""
        side = 0 if isinstance(values[0], Weight) else 1
        weight, x = (
            values[side],
            self.dropped(with_dtype(values[1 - side]), values[side]),
        )
        contract, batch = equation.params["dimension_numbers"]
        fit = factors(weight, batch[side], contract[side])
        if fit is None:
            return None
        forward = apply(equation, _replaced(values, side, frozen_view(weight)))[0]
        count, summed = len(batch[side]), len(contract[side])
        lead = tuple(range(count))
        precision = equation.params["precision"]
        # Dims: batch, free dims of x, rank.
        ends = (contract[1 - side], tuple(range(count, count + summed)))
        thin = lax.dot_general(
            x, fit.first, (ends, (batch[1 - side], lead)), precision=precision
        )
        ends = ((thin.ndim - 1,), (count,))
        # Dims: batch, free dims of x, free dims of the weight.
        change = lax.dot_general(
            thin, fit.second, (ends, (lead, lead)), precision=precision
        )
        first = change.ndim - len(fit.free)
        places = [*range(first, change.ndim)]
        if side == 0:
            change = lax.transpose(change, [*lead, *places, *range(count, first)])
            places = [*range(count, count + len(fit.free))]
        found = forward + scaled(change, weight.target.scale).astype(forward.dtype)
        return with_lengths(found, weight, fit, [*lead, *places])

    def ragged_dot(self, equation: Any, values: list[Any]) -> Any:
        """A product whose rows choose the weight, as experts do."""
        x, weight = values[0], values[1]
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (_, inputs), batch = numbers.dot_dimension_numbers
        is_plain = (
            tuple(numbers.rhs_group_dimensions) == (0,)
            and tuple(inputs) == (1,)
            and not batch[0]
            and weight.target.r
            and not weight.target.is_dora
            and len(weight.dims) == 3
        )
        fit = factors(weight, (0,), (1,)) if is_plain else None
        if fit is None:
            return None
        forward = apply(equation, _replaced(values, 1, frozen_view(weight)))[0]
        x = self.dropped(with_dtype(x), weight)
        same = {"precision": equation.params["precision"]}
        thin = lax.ragged_dot_general(x, fit.first, values[2], numbers, **same)
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((thin.ndim - 1,), (1,)), ((), ())),
            lhs_ragged_dimensions=numbers.lhs_ragged_dimensions,
            rhs_group_dimensions=(0,),
        )
        change = lax.ragged_dot_general(thin, fit.second, values[2], numbers, **same)
        return forward + scaled(change, weight.target.scale).astype(forward.dtype)

    def experts(self, equation: Any, values: list[Any]) -> Any:
        """Experts whose stored rows are decoded one by one, if they have no adapter.

        So a program can read the stored rows of those experts alone that are chosen.
        """
        params, first = equation.params, values[:NUM_OPERANDS]
        function = jax.extend.core.jaxpr_as_fun(params["expert"])

        def in_rows(value: Any) -> Any:
            has_adapter = isinstance(value, Weight) and value.target.r
            return self.as_array(value) if has_adapter else self.as_rows(value)

        def decoded(own: Sequence[Any], rows: jax.Array) -> jax.Array:
            return function(*map(self.as_array, own), rows)[0]

        choice, x, gate = map(with_dtype, first)
        weights = [in_rows(value) for value in values[NUM_OPERANDS:]]
        return sum_of_chosen(decoded, params["block"], weights, x, choice, gate)

    def dropped(self, x: Any, weight: Weight) -> Any:
        """An adapter's input with some entries zero, others larger.

        Each place of the program and each row of a stack draws its own.
        """
        if self.key is None or not self.dropout:
            return x
        key = jax.random.fold_in(self.key, self.num_sites)
        self.num_sites += 1
        row = weight.parts[ROW]
        if not row.ndim:
            key = jax.random.fold_in(key, row)
        keep = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(keep, scaled(x, 1 / (1 - self.dropout)), jnp.zeros_like(x))


@dataclass(frozen=True)
class Factors:
    """The factors of an adapter, for a product with a view of its weight.

    Attributes:
        first: of dims (batch, contracted dims of the view, rank).
        second: of dims (batch, rank, free dims of the view).
        batch, free: the weight's dims in those dims of the view.
    """

    first: Any
    second: Any
    batch: tuple[Any, ...]
    free: tuple[Any, ...]


def factors(
    weight: Weight, batch: Sequence[int], contract: Sequence[int]
) -> Factors | None:
    """The factors for a product, or None if its dims are not the adapter's.

    Args:
        batch, contract: dims of the view.
    """
    target, lead = weight.target, lead_left(weight)
    if not target.r or {*union(weight.dims, batch)} != wide(lead, target):
        return None
    inputs, outputs = target.contraction.inputs, target.contraction.outputs
    names, summed = (LORA_A, LORA_B), {*union(weight.dims, contract)}
    own: Any = (*lead, *inputs, None), (*lead, None, *outputs)
    if summed == {*outputs} != {*inputs} and not target.is_dora:
        # The transposed weight: (A B)^T = B^T A^T.
        names, own = names[::-1], own[::-1]
    elif summed != {*inputs}:
        return None
    rank: Any = (None,)
    batched = tuple(weight.dims[i] for i in batch)
    contracted = tuple(weight.dims[i] for i in contract)
    used = {*batch, *contract}
    free = tuple(g for i, g in enumerate(weight.dims) if i not in used)
    groups = (*batched, *contracted, rank), (*batched, rank, *free)
    first, second = (
        arranged(weight.parts[name], dims, wanted, target.shape).astype(weight.dtype)
        for name, dims, wanted in zip(names, own, groups, strict=True)
    )
    return Factors(first, second, batched, free)


def wide(dims: Sequence[int], target: Target) -> set[int]:
    """Those of `dims` that are not of size 1 in the target's weight."""
    return {i for i in dims if target.shape[i] != 1}


def with_lengths(
    found: Any, weight: Weight, fit: Factors, places: Sequence[int]
) -> Any:
    """A product times DoRA's factor of each column; without DoRA the product.

    Args:
        places: the product's dims that are batch and free dims of the weight.
    """
    target = weight.target
    if not target.is_dora:
        return found
    own = (*lead_left(weight), *target.contraction.outputs)
    factor = arranged(gain(weight), own, (*fit.batch, *fit.free), target.shape)
    factor = lax.broadcast_in_dim(factor, found.shape, places)
    return (found.astype(jnp.float32) * factor).astype(found.dtype)


def view(equation: Any, values: list[Any]) -> Weight | None:
    """The weight after a cast, transpose, reshape or row read of it; else None."""
    weight: Weight = values[0]
    target, name = weight.target, equation.primitive.name
    new = equation.outvars[0].aval.shape
    dtype = str(equation.outvars[0].aval.dtype)
    if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        return None
    dims = viewed(equation, weight.dims, target.shape)
    if dims is not None:
        if name in CASTS:
            return step(weight, "cast", dtype, dims, dtype)
        if name == "transpose":
            permutation = tuple(equation.params["permutation"])
            return step(weight, "transpose", permutation, dims, dtype)
        return step(weight, "reshape", tuple(new), dims, dtype)
    can_take = weight.taken < target.contraction.stack
    if can_take and weight.is_row and is_row(equation):
        parts = {n: _row(equation, x, values[1:]) for n, x in weight.parts.items()}
        row = replace(weight, parts=parts, taken=weight.taken + 1, steps=weight.casts)
        return step(row, "reshape", tuple(new), ((), *weight.dims[1:]), dtype)
    return None


def _row(equation: Any, part: Any, starts: Sequence[Any]) -> Any:
    """The row of one of the weight's arrays that a slice equation reads."""
    if equation.primitive.name == "slice":
        start = equation.params["start_indices"][0]
        return lax.squeeze(lax.slice_in_dim(part, start, start + 1), (0,))
    return lax.dynamic_index_in_dim(part, with_dtype(starts[0]), keepdims=False)


def _replaced(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    return [value if i == place else x for i, x in enumerate(values)]
