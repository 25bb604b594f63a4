"""A frozen weight with its adapter, as one value that a loss computes with.

With dims S (stack and batch), I (summed over), O (the others) and rank r, the weight
W_SIO is used as W_SIO + scale * A_SIr B_SrO (LoRA, https://arxiv.org/abs/2106.09685),
or with the lengths of its columns replaced (DoRA, https://arxiv.org/abs/2402.09353).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zinf.adapt.blocks import Encoding
from zinf.adapt.contraction import Contraction
from zinf.core.jaxpr.dims import Dims, Shape, own_dims

WEIGHT, LORA_A, LORA_B = "weight", "lora_A", "lora_B"
MAGNITUDE = "lora_magnitude_vector"
ROW = "row"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A weight that the transform changes.

    Attributes:
        path: its key path in the user's parameters.
        shape, dtype: of the user's parameter.
        contraction: how the loss uses it.
        r: rank of its adapter; 0 if it is only stored otherwise.
        scale: factor of the product of `lora_A` and `lora_B`.
        is_dora: whether it has a magnitude vector.
        encoding: how it is stored; None: as it is.
    """

    path: str
    shape: Shape
    dtype: str
    contraction: Contraction
    r: int = 0
    scale: float = 0.0
    is_dora: bool = False
    encoding: Encoding | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The stack and batch dims, which both factors have."""
        return (*range(self.contraction.stack), *self.contraction.batch)

    def sizes(self, dims: Sequence[int]) -> Shape:
        return tuple(self.shape[i] for i in dims)

    @property
    def factor_shapes(self) -> dict[str, Shape]:
        """Shapes of the adapter's arrays by name."""
        if not self.r:
            return {}
        lead = self.sizes(self.lead)
        inputs = self.sizes(self.contraction.inputs)
        outputs = self.sizes(self.contraction.outputs)
        shapes = {LORA_A: (*lead, *inputs, self.r), LORA_B: (*lead, self.r, *outputs)}
        if self.is_dora:
            shapes[MAGNITUDE] = (*lead, *outputs)
        return shapes


@dataclass(frozen=True)
class Weight:
    """A view of a target while the loss is evaluated; a pytree of its `parts`.

    Attributes:
        parts: the stored weight (`WEIGHT`, or the arrays of its encoding), the arrays
            of its adapter, and with dropout `ROW`, the number of each row of a stack.
        taken: leading dims of which one entry was taken; all parts lack them.
            dims: the weight's dims in each dim of the view.
        steps: what turns the row of the weight into the view, as names and arguments.
        own_dtype, dtype: of the weight, and of the view.
    """

    parts: Mapping[str, Any]
    target: Target
    taken: int
    dims: Dims
    steps: tuple[tuple[str, Any], ...]
    own_dtype: str
    dtype: str

    @property
    def is_row(self) -> bool:
        """Whether the view is the weight, or one row of its stack, up to casts."""
        return self.dims == own_dims(self.target.shape)[self.taken :]

    @property
    def casts(self) -> tuple[tuple[str, Any], ...]:
        """The casts among `steps`: if `is_row`, the other steps cancel out."""
        return tuple(s for s in self.steps if s[0] == "cast")


def _flatten(weight: Weight) -> tuple[tuple[Any, ...], Any]:
    names = tuple(weight.parts)
    rest = replace(weight, parts={})
    return tuple(weight.parts.values()), (names, _Static(rest))


def _unflatten(static: Any, parts: Sequence[Any]) -> Weight:
    names, rest = static
    return replace(rest.weight, parts=dict(zip(names, parts, strict=True)))


@dataclass(frozen=True)
class _Static:
    """All fields of a weight but its arrays, as static data that jax compares."""

    weight: Weight

    def __hash__(self) -> int:
        return hash((self.weight.target.path, self.weight.taken, self.weight.dims))


jax.tree_util.register_pytree_node(Weight, _flatten, _unflatten)


def whole(target: Target, parts: Mapping[str, Any], dtype: str) -> Weight:
    """The weight as the loss gets it."""
    return Weight(parts, target, 0, own_dims(target.shape), (), dtype, dtype)


def lead_left(weight: Weight) -> tuple[int, ...]:
    return tuple(i for i in weight.target.lead if i >= weight.taken)


def product(weight: Weight) -> Any:
    """scale * lora_A @ lora_B of a weight or a row, dims in the weight's order."""
    target, lead = weight.target, lead_left(weight)
    inputs, outputs = target.contraction.inputs, target.contraction.outputs
    count, dtype = len(lead), weight.own_dtype
    a, b = (weight.parts[name].astype(dtype) for name in (LORA_A, LORA_B))
    batch = tuple(range(count))
    contract = ((a.ndim - 1,), (count,))
    found = lax.dot_general(a, b, (contract, (batch, batch)))
    order = (*lead, *inputs, *outputs)
    found = lax.transpose(found, [order.index(i) for i in sorted(order)])
    return scaled(found.reshape(target.shape[weight.taken :]), target.scale)


def stored(weight: Weight) -> Any:
    """The frozen row in the weight's dtype, decoded, before its steps."""
    target = weight.target
    if target.encoding is None:
        row = weight.parts[WEIGHT]
    else:
        names = target.encoding.names
        arrays = {name: weight.parts[name] for name in names}
        row = target.encoding.decode(arrays, target.shape[target.contraction.stack :])
        row = row.astype(weight.own_dtype)
    return row.reshape(target.shape[weight.taken :])


def frozen_view(weight: Weight) -> Any:
    """The frozen weight alone, in the form of the view."""
    return _in_view(weight, stored(weight))


def merged_view(weight: Weight) -> Any:
    """The weight with its adapter, in the form of the view."""
    return _in_view(weight, merged(weight))


def merged(weight: Weight) -> Any:
    """The weight with its adapter, before the view's steps."""
    row = stored(weight)
    if not weight.target.r:
        return row
    change = product(weight)
    # An export adds in float32, and rounds once to the dtype of the base.
    row = (row.astype(change.dtype) + change).astype(row.dtype)
    if weight.target.is_dora:
        gain = _gain(weight, row)
        found = row.astype(jnp.float32) * expanded(gain, weight)
        row = found.astype(row.dtype)
    return row


def gain(weight: Weight) -> Any:
    """DoRA's factor of each column: its magnitude over its L2 norm, float32.

    The norm has no gradient (section 4.3 of the paper). Dims: lead, outputs.

    The length has no gradient (section 4.3 of the paper). Dims: lead, outputs.
    """
    change = product(weight)
    return _gain(weight, stored(weight).astype(change.dtype) + change)


def lengths(row: Any, target: Target, *, taken: int = 0) -> Any:
    """The L2 norm of each column of a weight or of a row of it. Dims: lead, outputs."""
    lead = tuple(i for i in target.lead if i >= taken)
    order = (*lead, *target.contraction.outputs)
    squares = jnp.square(row.astype(jnp.float32))
    squares = squares.reshape(target.shape[taken:])
    summed = [i - taken for i in target.contraction.inputs]
    found = jnp.sqrt(jnp.sum(squares, axis=tuple(summed)))
    left = [i for i in range(taken, len(target.shape)) if i - taken not in summed]
    sizes = {i: target.shape[i] for i in left if i in order}
    found = found.reshape(tuple(sizes.values()))
    names = list(sizes)
    return lax.transpose(found, [names.index(i) for i in order])


def _gain(weight: Weight, row: Any) -> Any:
    length = lengths(row, weight.target, taken=weight.taken)
    magnitude = weight.parts[MAGNITUDE].astype(jnp.float32)
    return magnitude / lax.stop_gradient(length)


def expanded(gain: Any, weight: Weight) -> Any:
    """The factor of each column in the shape of the row, with size 1 where summed."""
    target, taken = weight.target, weight.taken
    order = (*lead_left(weight), *target.contraction.outputs)
    found = lax.transpose(gain, [order.index(i) for i in sorted(order)])
    shape = [n if i in order else 1 for i, n in enumerate(target.shape)]
    return jnp.broadcast_to(found.reshape(shape[taken:]), target.shape[taken:])


def arranged(
    array: Any, own: Sequence[int | None], groups: Sequence[Any], shape: Shape
) -> Any:
    """An array transposed and reshaped so that its dims are groups of the weight's.

    Args:
        own: the weight's dim of each dim of the array; None: the rank.
        groups: the weight's dims in each dim of the result, without those of size 1;
            (None,) stands for the rank.
        shape: the weight's.
    """
    left = [i for i in own if i is None or shape[i] != 1]
    rank = array.shape[list(own).index(None)] if None in own else 1
    sizes = {i: rank if i is None else shape[i] for i in left}
    order = [i for group in groups for i in group]
    array = array.reshape(tuple(sizes.values()))
    array = lax.transpose(array, [left.index(i) for i in order])
    return array.reshape([prod(sizes[i] for i in group) for group in groups])


def scaled(x: Any, factor: float) -> Any:
    return x * jnp.asarray(factor, x.dtype)


def step(weight: Weight, name: str, argument: Any, dims: Dims, dtype: str) -> Weight:
    """The view after one more step, `name` with its `argument`: it has `dims`."""
    steps = (*weight.steps, (name, argument))
    return replace(weight, steps=steps, dims=dims, dtype=dtype)


def _in_view(weight: Weight, row: Any) -> Any:
    for name, argument in weight.steps:
        if name == "cast":
            row = row.astype(argument)
        elif name == "transpose":
            row = lax.transpose(row, argument)
        else:
            row = row.reshape(argument)
    return row
