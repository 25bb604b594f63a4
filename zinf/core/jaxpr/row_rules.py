"""Rules for rows: along which dim the results of an equation have them.

A value is *by row* along a dim if its block k of n can be computed from block k of its
inputs. A rule gives that dim for one equation, from the dims of its operands. An
equation that cannot run by row raises an error that says why.
"""

from collections.abc import Callable, Mapping
from math import prod

from zinf.core.jaxpr.compat import Equation
from zinf.core.jaxpr.primitives import ELEMENTWISE

Dims = Mapping[int, int]
"""Of the operands that are by row, by number: along which dim."""


class NotByRow(Exception):
    """Why an equation needs all rows, for a message to the user."""


class Sum:
    """A result that is the sum of the results of all blocks of rows."""


def result_dim(equation: Equation, dims: Dims) -> int | type[Sum]:
    """The dim along which results are by row.

    Operands that are not in `dims` are equal for all rows. But those of an elementwise
    equation, and the other factor of a matmul along `paired`, must be by row too (see
    `needs`).

    Raises:
        NotByRow: it needs all rows at once.
    """
    name = equation.primitive.name
    if not _is_known(equation):
        raise NotByRow(f"`{name}`")
    if name not in RULES:
        return _one(equation, dims)
    found = RULES[name](equation, dims)
    # `jax.vmap` writes dims as NumPy's integers.
    return found if isinstance(found, type) else int(found)


def _is_known(equation: Equation) -> bool:
    """Whether there is a rule for the equation, which may still refuse."""
    name = equation.primitive.name
    return name in ELEMENTWISE or name in RULES or name == "stop_gradient"


def is_opaque(equation: Equation) -> bool:
    """Whether an equation has a program inside, or is unknown, or is an attention."""
    return not _is_known(equation) or equation.primitive.name == "attention"


def needs(equation: Equation, dims: Dims) -> dict[int, int]:
    """Further operands, by number, that have to be by row, and along which dim."""
    name = equation.primitive.name
    if name in ELEMENTWISE or name in ("concatenate", "sort"):
        dim, out = _one(equation, dims), equation.outvars[0].aval
        return {
            n: dim
            for n, a in enumerate(equation.invars)
            if n not in dims
            and a.aval.ndim == out.ndim
            # A dim of size one is broadcast to all rows.
            and (name == "concatenate" or a.aval.shape[dim] == out.shape[dim])
        }
    if name == "dot_general" and len(dims) == 1:
        ((number, dim),) = dims.items()
        contracted, batch = equation.params["dimension_numbers"]
        for pair in (contracted, batch):
            if dim in pair[number]:
                return {1 - number: pair[1 - number][list(pair[number]).index(dim)]}
    if name == "gather" and 0 in dims:
        numbers = equation.params["dimension_numbers"]
        if dims[0] in numbers.operand_batching_dims:
            place = list(numbers.operand_batching_dims).index(dims[0])
            return (
                {1: numbers.start_indices_batching_dims[place]} if 1 not in dims else {}
            )
    if name == "scatter-add":
        return {n: d for n, d in _scatter_dims(equation, dims).items() if n not in dims}
    if name == "attention":
        wanted = _attention_dims(equation, dims)
        return {n: d for n, d in wanted.items() if n not in dims}
    return {}


def operand_dims(equation: Equation, dim: int) -> dict[int, int] | None:
    """The operands from whose rows a result can be made by row along `dim`.

    Returns:
        By number, the dim of each operand that is read by row; None: the result has to
        be made whole.
    """
    name, out = equation.primitive.name, equation.outvars[0].aval
    if name in ELEMENTWISE:
        shapes = [a.aval.shape for a in equation.invars]
        # A dim of size one is broadcast to all rows.
        return {
            n: dim
            for n, shape in enumerate(shapes)
            if len(shape) == out.ndim and shape[dim] > 1
        }
    if name == "iota":
        return {} if equation.params["dimension"] != dim else None
    if name == "broadcast_in_dim":
        dims = list(equation.params["broadcast_dimensions"])
        if dim not in dims or equation.invars[0].aval.shape[dims.index(dim)] == 1:
            return {}
        return {0: dims.index(dim)}
    if name == "scatter-add":
        return _scattered_dims(equation, dim)
    return None


def _scattered_dims(equation: Equation, dim: int) -> dict[int, int] | None:
    """`operand_dims` of a scatter that has a batch dim for the rows."""
    numbers = equation.params["dimension_numbers"]
    batching = list(numbers.operand_batching_dims)
    if dim not in batching:
        return None
    index = numbers.scatter_indices_batching_dims[batching.index(dim)]
    rank, windows = equation.invars[2].aval.ndim, numbers.update_window_dims
    scattered = [d for d in range(rank) if d not in windows]
    return {0: dim, 1: index, 2: scattered[index]}


def resized_params(equation: Equation, dim: int, size: int) -> dict:
    """The parameters of an equation whose result has `size` rows along `dim`."""
    params, name = dict(equation.params), equation.primitive.name
    shape = list(equation.outvars[0].aval.shape)
    if name in SHAPE_PARAMS:
        shape[dim] = size
        params[SHAPE_PARAMS[name]] = tuple(shape)
    elif name == "slice":
        limits = list(params["limit_indices"])
        limits[dim] = size
        params["limit_indices"] = tuple(limits)
    elif name == "dynamic_slice":
        sizes = list(params["slice_sizes"])
        sizes[dim] = size
        params["slice_sizes"] = tuple(sizes)
    elif name == "gather":
        params["slice_sizes"] = _slice_sizes(equation, dim, size)
    return params


SHAPE_PARAMS = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "iota": "shape"}


def _one(equation: Equation, dims: Dims) -> int:
    """The one dim along which all operands are by row."""
    found = set(dims.values())
    if len(found) > 1:
        raise NotByRow(f"`{equation.primitive.name}` mixes rows with others")
    return found.pop()


def _broadcast(equation: Equation, dims: Dims) -> int:
    dim = _one(equation, dims)
    to = equation.params["broadcast_dimensions"][dim]
    if equation.outvars[0].aval.shape[to] != equation.invars[0].aval.shape[dim]:
        raise NotByRow("`broadcast_in_dim` of a single row")
    return to


def _transpose(equation: Equation, dims: Dims) -> int:
    return equation.params["permutation"].index(_one(equation, dims))


def _squeeze(equation: Equation, dims: Dims) -> int:
    dim = _one(equation, dims)
    gone = [d % equation.invars[0].aval.ndim for d in equation.params["dimensions"]]
    if dim in gone:
        raise NotByRow("`squeeze` of a single row")
    return dim - sum(d < dim for d in gone)


def _reshape(equation: Equation, dims: Dims) -> int:
    """Blocks stay contiguous unless a dim before them is merged with theirs."""
    dim, old = _one(equation, dims), equation.invars[0].aval.shape
    new = equation.outvars[0].aval.shape
    before = prod(old[:dim])
    for place, length in enumerate(new):
        fits = length % old[dim] == 0 or old[dim] % length == 0
        if prod(new[:place]) == before and length > 1 and fits:
            return place
    raise NotByRow(f"`reshape` from {list(old)} to {list(new)}")


def _slice(equation: Equation, dims: Dims) -> int:
    dim = _one(equation, dims)
    if equation.outvars[0].aval.shape[dim] != equation.invars[0].aval.shape[dim]:
        raise NotByRow(f"`{equation.primitive.name}` of some rows")
    return dim


def _reduce(equation: Equation, dims: Dims) -> int:
    dim, axes = _one(equation, dims), equation.params["axes"]
    if dim in axes:
        raise NotByRow(f"`{equation.primitive.name}` over rows")
    return dim - sum(d < dim for d in axes)


def _reduce_sum(equation: Equation, dims: Dims) -> int | type[Sum]:
    return (
        Sum
        if _one(equation, dims) in equation.params["axes"]
        else _reduce(equation, dims)
    )


def _along(param: str) -> Callable[[Equation, Dims], int]:
    """A rule for equations that work along one dim, named by a parameter."""

    def rule(equation: Equation, dims: Dims) -> int:
        dim, axis = _one(equation, dims), equation.params[param]
        if dim == axis:
            raise NotByRow(f"`{equation.primitive.name}` along rows")
        return dim

    return rule


def _top_k(equation: Equation, dims: Dims) -> int:
    dim, operand = _one(equation, dims), equation.invars[0]
    if dim == equation.params.get("axis", operand.aval.ndim - 1) % operand.aval.ndim:
        raise NotByRow("`top_k` along rows")
    return dim


def _pad(equation: Equation, dims: Dims) -> int:
    dim = _one(equation, dims)
    if any(equation.params["padding_config"][dim]):
        raise NotByRow("`pad` of rows")
    return dim


def _rev(equation: Equation, dims: Dims) -> int:
    dim = _one(equation, dims)
    if dim in equation.params["dimensions"]:
        raise NotByRow("`rev` of rows")
    return dim


def _dot(equation: Equation, dims: Dims) -> int | type[Sum]:
    contracted, batch = equation.params["dimension_numbers"]
    if len(dims) == 2:
        both = dims[0], dims[1]
        if both in zip(*contracted, strict=True):
            return Sum
        if both in zip(*batch, strict=True):
            return list(batch[0]).index(both[0])
        raise NotByRow("`dot_general` of rows with other rows")
    ((number, dim),) = dims.items()
    taken = {*contracted[number], *batch[number]}
    if dim in taken:
        raise NotByRow("`dot_general` over rows")
    free = [d for d in range(equation.invars[number].aval.ndim) if d not in taken]
    first = len(batch[0])
    if number == 1:
        first = equation.outvars[0].aval.ndim - len(free)
    return first + free.index(dim)


def _gather(equation: Equation, dims: Dims) -> int:
    numbers = equation.params["dimension_numbers"]
    out_rank = equation.outvars[0].aval.ndim
    batch = [d for d in range(out_rank) if d not in numbers.offset_dims]
    indices_batching = list(numbers.start_indices_batching_dims)
    if 1 in dims:
        dim = dims[1]
        is_paired = dim in indices_batching
        if 0 in dims:
            operand = numbers.operand_batching_dims
            if not is_paired or operand[indices_batching.index(dim)] != dims[0]:
                raise NotByRow("`gather` from rows by other rows")
        elif is_paired:
            raise NotByRow("`gather` from what is not by row")
        return batch[dim]  # without the last dim of indices, which is not a batch dim
    dim, shape = dims[0], equation.invars[0].aval.shape
    if equation.params["slice_sizes"][dim] != shape[dim]:
        raise NotByRow("`gather` of some rows")
    return numbers.offset_dims[_offset(equation, dim)]


def _offset(equation: Equation, dim: int) -> int:
    """The offset dim that belongs to a dim of the operand."""
    numbers = equation.params["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    return sum(d < dim and d not in gone for d in range(dim))


def _scatter_add(equation: Equation, dims: Dims) -> int | type[Sum]:
    wanted = _scatter_dims(equation, dims)
    if dict(dims) != {n: d for n, d in wanted.items() if n in dims} or 2 not in dims:
        raise NotByRow("`scatter-add` of rows to other rows")
    return wanted.get(0, Sum)


def _scatter_dims(equation: Equation, dims: Dims) -> dict[int, int]:
    """The dims of operand, indices and updates that go with that of the updates.

    Without one of the operand, all rows are added to one and the same array.
    """
    numbers = equation.params["dimension_numbers"]
    windows, rank = numbers.update_window_dims, equation.invars[2].aval.ndim
    scattered = [d for d in range(rank) if d not in windows]
    if 2 not in dims and 1 not in dims:
        raise NotByRow("`scatter-add` to rows")
    update = dims[2] if 2 in dims else scattered[dims[1]]
    if update in windows:
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        kept = [d for d in range(equation.invars[0].aval.ndim) if d not in gone]
        dim = kept[list(windows).index(update)]
        if equation.invars[0].aval.shape[dim] != equation.invars[2].aval.shape[update]:
            raise NotByRow("`scatter-add` to some rows")
        return {0: dim, 2: update}
    index = scattered.index(update)
    found = {1: index, 2: update}
    if index in numbers.scatter_indices_batching_dims:
        place = list(numbers.scatter_indices_batching_dims).index(index)
        found[0] = numbers.operand_batching_dims[place]
    return found


def _attention(equation: Equation, dims: Dims) -> int:
    """By examples, or by heads if there are as many of keys as of queries."""
    wanted = _attention_dims(equation, dims)
    if dict(dims) != {n: d for n, d in wanted.items() if n in dims}:
        raise NotByRow("`attention` of rows with other rows")
    return wanted[0]


# The dims of examples and of heads of the operands of an attention besides q, k and v;
# those with one element there are read whole.
ATTENTION_DIMS = {
    "q_segments": (0, None),
    "k_segments": (0, None),
    "q_positions": (0, None),
    "k_positions": (0, None),
    "mask": (0, 1),
    "bias": (0, 1),
    "sinks": (None, 0),
    "dropout_key": (None, None),
}


def _attention_dims(equation: Equation, dims: Dims) -> dict[int, int]:
    """The dims of all operands that go with those of the operands that are by row."""
    names = equation.params["names"]
    number, dim = next(iter(dims.items()))
    places = (0, 2) if number < 3 else ATTENTION_DIMS[names[number]]
    if dim not in places or equation.params["spec"].dropout:
        raise NotByRow("`attention` over rows")
    kind = places.index(dim)
    q, k = (equation.invars[n].aval.shape for n in (0, 1))
    if kind and q[2] != k[2]:
        raise NotByRow("`attention` of groups of heads")
    found = dict.fromkeys(range(3), (0, 2)[kind])
    for n, name in enumerate(names[3:], 3):
        place = ATTENTION_DIMS[name][kind]
        if place is not None and equation.invars[n].aval.shape[place] > 1:
            found[n] = place
    return found


def _slice_sizes(equation: Equation, dim: int, size: int) -> tuple[int, ...]:
    numbers = equation.params["dimension_numbers"]
    sizes = list(equation.params["slice_sizes"])
    if dim in numbers.offset_dims:
        place = list(numbers.offset_dims).index(dim)
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [d for d in range(len(sizes)) if d not in gone]
        sizes[kept[place]] = size
    return tuple(sizes)


RULES: dict[str, Callable[[Equation, Dims], int | type[Sum]]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "slice": _slice,
    "dynamic_slice": _slice,
    "reduce_sum": _reduce_sum,
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _reduce
    ),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(
        ("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"), _along("axis")
    ),
    "split": _along("axis"),
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    "top_k": _top_k,
    "pad": _pad,
    "rev": _rev,
    "dot_general": _dot,
    "gather": _gather,
    "scatter-add": _scatter_add,
    "attention": _attention,
    "sharding_constraint": _one,
}
