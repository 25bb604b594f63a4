"""How dims of operands become dims of results, as the table of primitives says.

A primitive that is not in the table is refused by name where a wrong answer would
change numbers (`factor_of`, `viewed`), and guessed where it only costs bytes between
devices (`guessed_dim`, `guessed_view`).
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from zinf.core.jaxpr.compat import Equation
from zinf.core.jaxpr.primitives import (
    CASTS,
    FROM_ROWS,
    MIXED,
    MOVING,
    PARTS,
    RULES,
    SAME,
    SIZE_PARAMS,
    VIEWS,
    Factor,
    factors,
    keeps_order,
    offset_dims,
)

Shape = tuple[int, ...]
Dims = tuple[tuple[int, ...], ...]
"""For each dim of a value, the dims of an array that it consists of, without those of
size 1: reshapes merge and split them."""


class Merge(NamedTuple):
    """A reshape after which a dim of its operand is the inner part of a larger dim.

    Attributes:
        old, new: the shapes of its operand and its result.
        dim: the larger dim, of the result.
        outer: the number of blocks of the larger dim; each has all entries of the dim.
    """

    old: Shape
    new: Shape
    dim: int
    outer: int


class NotByRow(Exception):
    """Why an equation needs all rows of a dim, for a message to the user."""


def factor_of(equation: Equation, dims: Mapping[int, int]) -> Factor:
    """The factor of the given dims of operands, by number.

    Raises:
        NotByRow: the primitive is unknown, the dims are of different factors, or all
            entries are needed at once.
    """
    name = equation.primitive.name
    if name not in RULES:
        raise NotByRow(f"`{name}`")
    known, first = RULES[name](equation), next(iter(dims))
    for given in (dims, {first: dims[first]}):
        for factor in known:
            if given.items() <= factor.operands.items():
                if factor.why_whole:
                    raise NotByRow(f"`{name}` {factor.why_whole}")
                if given is dims:
                    return factor
    raise NotByRow(f"`{name}` {MIXED.get(name, 'mixes rows with others')}")


def guessed_dim(equation: Equation, dims: Mapping[int, int]) -> int | None:
    """The dim of the results that the given dims of operands become, or None.

    Where a rule refuses, parts of a dim count as the dim, and so does the same dim of a
    result with the operand's shape.
    """
    try:
        return factor_of(equation, dims).result
    except NotByRow:
        if not equation.outvars:
            return None
        name, out = equation.primitive.name, equation.outvars[0].aval
        number, dim = next(iter(dims.items()))
        is_alike = equation.invars[number].aval.shape == getattr(out, "shape", None)
        keeps = name in PARTS or is_alike and name not in MOVING
        return dim if keeps else None


def sources(equation: Equation, dim: int) -> Mapping[int, int] | None:
    """The operands from whose rows a result can be made by row along `dim`.

    Returns:
        By number, the dim of each operand that is read by row; None: the result has to
        be made whole.
    """
    name = equation.primitive.name
    if name == "iota":
        return {} if equation.params["dimension"] != dim else None
    if name not in FROM_ROWS:
        return None
    return next((f.operands for f in factors(equation) if f.result == dim), None)


def is_opaque(equation: Equation) -> bool:
    """Whether an equation has a program inside, or is unknown, or is an attention."""
    name = equation.primitive.name
    return name not in RULES or name == "attention"


def resized_params(equation: Equation, dim: int, size: int) -> dict:
    """The parameters of an equation whose results have `size` rows along `dim`."""
    params, name = dict(equation.params), equation.primitive.name
    if name not in SIZE_PARAMS:
        return params
    key = SIZE_PARAMS[name]
    # The dim of the operand that the result's dim is, where the parameter counts those.
    place = dim if name != "gather" else offset_dims(equation).get(dim)
    if place is not None:
        shape = equation.outvars[0].aval.shape
        sizes = list(shape if key in ("shape", "new_sizes") else params[key])
        sizes[place] = size
        params[key] = tuple(sizes)
    return params


# Views: the dims of an array in a value that only shows it in another form.


def own_dims(shape: Shape) -> Dims:
    """The `Dims` of an array itself: dim i holds dim i, unless its size is 1."""
    return tuple((i,) if size != 1 else () for i, size in enumerate(shape))


def viewed(equation: Equation, dims: Dims, shape: Shape) -> Dims | None:
    """The dims of an array of `shape` after an equation that only shows it otherwise.

    None for any other equation, and if a dim of the array is cut or repeated.
    """
    if equation.primitive.name not in CASTS | VIEWS:
        return None
    after, new = _moved(equation, dims, shape), equation.outvars[0].aval.shape
    left = {i for group in dims for i in group} - {i for group in after for i in group}
    sizes = tuple(prod(shape[i] for i in group) for group in after)
    return after if not left and sizes == new else None


def guessed_view(equation: Equation, dims: Dims, shape: Shape) -> Dims | None:
    """`viewed`, where the array may also be rounded or cut: such dims are left out."""
    if equation.primitive.name not in SAME:
        num_arrays = sum(a.aval.ndim > 0 for a in equation.invars)
        if equation.primitive.name not in VIEWS | PARTS or num_arrays > 1:
            return None
    return _moved(equation, dims, shape)


def _moved(equation: Equation, dims: Dims, shape: Shape) -> Dims:
    new = equation.outvars[0].aval.shape
    if equation.primitive.name in SAME:
        return dims
    if equation.primitive.name == "reshape":
        kept = reshaped(dims, shape, new) if keeps_order(equation) else None
        return kept or ((),) * len(new)
    places = {f.result: f.operands[0] for f in factors(equation) if 0 in f.operands}
    return tuple(dims[places[d]] if d in places else () for d in range(len(new)))


def reshaped(dims: Dims, shape: Shape, new: Shape) -> Dims | None:
    """The dims after a reshape to `new`; None if a dim of the array is cut.

    Args:
        shape: the shape of the array.
    """
    left = [i for group in dims for i in group]
    found: list[tuple[int, ...]] = []
    for size in new:
        group: list[int] = []
        while prod(shape[i] for i in group) < size and left:
            group.append(left.pop(0))
        if prod(shape[i] for i in group) != size:
            return None
        found.append(tuple(group))
    return None if left else tuple(found)


def merge_of(equation: Equation, dim: int) -> Merge | None:
    """How an equation merges a dim of its operand with dims before it, if it does."""
    if equation.primitive.name != "reshape" or not keeps_order(equation):
        return None
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if 0 in old:
        return None
    before, size = prod(old[:dim]), old[dim]
    for to, length in enumerate(new):
        outer, rest = divmod(before, prod(new[:to]))
        if not rest and 1 < outer < length and length % outer == 0:
            inside = length // outer
            fits = not (inside % size and size % inside)
            return Merge(old, new, to, outer) if fits else None
    return None


def split(shape: Shape, dim: int, outer: int) -> Shape:
    """A shape with one dim as two, of `outer` blocks and of what is in a block."""
    return (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])


def union(dims: Dims, chosen: Sequence[int]) -> tuple[int, ...]:
    """The array's dims that the dims `chosen` of a value hold, in their order."""
    return tuple(i for dim in chosen for i in dims[dim])
