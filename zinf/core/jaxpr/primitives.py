"""What is known of each primitive: one table.

A *factor* of an equation is one of its indices, as in an einsum: the dims of operands
that it runs along together, and the dim of the results that they become. Block k of n
of the results along a factor can be computed from block k of its operands, and of no
other operand's; without a dim in the results, the results are the sum over all blocks.
A factor may also need all its entries at once, for a reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from zinf.core.jaxpr.compat import Equation


@dataclass(frozen=True)
class Factor:
    """One index of an equation, as in an einsum, with its dims of the arrays.

    Attributes:
        operands: by the number of an operand, its dim. An operand that is missing is
            read whole, such as a scalar, or is broadcast along the factor.
        result: the dim of all results; None: they are sums over the factor.
        why_whole: why all its entries are needed at once; empty: they are not.
    """

    operands: Mapping[int, int]
    result: int | None
    why_whole: str = ""


Rule = Callable[[Equation], list[Factor]]


def factors(equation: Equation) -> list[Factor]:
    """All factors of an equation; of an unknown one, none.

    Each dim of an array operand is in one of them, but for dims of indices.
    """
    rule = RULES.get(equation.primitive.name)
    return [] if rule is None else rule(equation)


def _each(equation: Equation) -> list[Factor]:
    """The factors of an element-wise equation: dims of equal size meet.

    A dim of size one is broadcast to all rows.
    """
    avals, out = [a.aval for a in equation.invars], equation.outvars[0].aval
    ranked = {n: x.shape for n, x in enumerate(avals) if x.ndim == out.ndim}
    return [
        Factor({n: dim for n, shape in ranked.items() if shape[dim] == size}, dim)
        for dim, size in enumerate(out.shape)
    ]


def _along(*params: str) -> Rule:
    """A rule for equations that work along one dim, named by a parameter."""

    def rule(equation: Equation) -> list[Factor]:
        arrays = [n for n, a in enumerate(equation.invars) if a.aval.ndim]
        rank = equation.invars[0].aval.ndim
        axis = next((equation.params[p] for p in params if p in equation.params), -1)
        return [
            Factor(
                dict.fromkeys(arrays, dim),
                None if dim == axis % rank else dim,
                "along rows" if dim == axis % rank else "",
            )
            for dim in range(rank)
        ]

    return rule


def _of_one(equation: Equation, places: Mapping[int, int], why: str) -> list[Factor]:
    """The factors of the first operand, from the places of its dims in the results.

    Args:
        why: why the entries of all other dims are needed at once.
    """
    return [
        Factor({0: dim}, places.get(dim), "" if dim in places else why)
        for dim in range(equation.invars[0].aval.ndim)
    ]


def _broadcast(equation: Equation) -> list[Factor]:
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    places = dict(enumerate(equation.params["broadcast_dimensions"]))
    places = {dim: to for dim, to in places.items() if old[dim] == new[to]}
    added = [Factor({}, to) for to in range(len(new)) if to not in places.values()]
    return _of_one(equation, places, "of a single row") + added


def _transpose(equation: Equation) -> list[Factor]:
    permutation = equation.params["permutation"]
    return _of_one(equation, {dim: to for to, dim in enumerate(permutation)}, "")


def _without(equation: Equation, gone: Sequence[int], why: str) -> list[Factor]:
    rank = equation.invars[0].aval.ndim
    taken = {dim % rank for dim in gone}
    kept = [dim for dim in range(rank) if dim not in taken]
    return _of_one(equation, {dim: to for to, dim in enumerate(kept)}, why)


def _squeeze(equation: Equation) -> list[Factor]:
    return _without(equation, equation.params["dimensions"], "of a single row")


def _unstack(equation: Equation) -> list[Factor]:
    return _without(equation, [equation.params["axis"]], "along rows")


def _stack(equation: Equation) -> list[Factor]:
    axis, operands = equation.params["axis"], range(len(equation.invars))
    dims = [dim for dim in range(equation.outvars[0].aval.ndim) if dim != axis]
    return [Factor(dict.fromkeys(operands, n), to) for n, to in enumerate(dims)]


def _reduce(equation: Equation) -> list[Factor]:
    return _without(equation, equation.params["axes"], "over rows")


def _reduce_sum(equation: Equation) -> list[Factor]:
    return _without(equation, equation.params["axes"], "")


def keeps_order(reshape: Equation) -> bool:
    """Whether a reshape leaves entries in their order, and permutes no dims before."""
    return reshape.params["dimensions"] is None


def _reshape(equation: Equation) -> list[Factor]:
    """The factors of a reshape: dims whose blocks stay contiguous.

    They do unless a dim before them is merged with theirs.
    """
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    places = {}
    for dim, size in enumerate(old if keeps_order(equation) else ()):
        for to, length in enumerate(new):
            fits = size and length > 1 and not (length % size and size % length)
            if fits and prod(new[:to]) == prod(old[:dim]):
                places.setdefault(dim, to)
    return _of_one(equation, places, f"from {list(old)} to {list(new)}")


def _slice(equation: Equation) -> list[Factor]:
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    places = {dim: dim for dim in range(len(old)) if old[dim] == new[dim]}
    return _of_one(equation, places, "of some rows")


def _pad(equation: Equation) -> list[Factor]:
    padding = enumerate(equation.params["padding_config"])
    return _of_one(equation, {d: d for d, x in padding if not any(x)}, "of rows")


def _rev(equation: Equation) -> list[Factor]:
    kept = set(range(equation.invars[0].aval.ndim)) - {*equation.params["dimensions"]}
    return _of_one(equation, {dim: dim for dim in kept}, "of rows")


def _dot(equation: Equation) -> list[Factor]:
    contracted, batch = equation.params["dimension_numbers"]
    pairs = [*zip(*batch, strict=True)]
    found = [Factor({0: i, 1: j}, place) for place, (i, j) in enumerate(pairs)]
    for n, atom in enumerate(equation.invars):
        taken = {*contracted[n], *batch[n]}
        free = [d for d in range(atom.aval.ndim) if d not in taken]
        found += [Factor({n: d}, place) for place, d in enumerate(free, len(found))]
    pairs = [*zip(*contracted, strict=True)]
    return found + [Factor({0: i, 1: j}, None) for i, j in pairs]


def _gather(equation: Equation) -> list[Factor]:
    numbers, rank = equation.params["dimension_numbers"], equation.outvars[0].aval.ndim
    shape, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
    places = {dim: to for to, dim in offset_dims(equation).items()}
    places = {dim: to for dim, to in places.items() if sizes[dim] == shape[dim]}
    batching = numbers.start_indices_batching_dims, numbers.operand_batching_dims
    paired = dict(zip(*batching, strict=True))
    own = [
        f
        for f in _of_one(equation, places, "of some rows")
        if f.operands[0] not in paired.values()
    ]
    batch = [d for d in range(rank) if d not in numbers.offset_dims]
    # The last dim of indices is not a batch dim.
    return own + [
        Factor({0: paired[dim], 1: dim} if dim in paired else {1: dim}, to)
        for dim, to in enumerate(batch)
    ]


def offset_dims(equation: Equation) -> dict[int, int]:
    """The operand's dim for each offset dim of the result of a gather."""
    numbers = equation.params["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(equation.invars[0].aval.ndim) if d not in gone]
    return dict(zip(numbers.offset_dims, kept, strict=True))


def _scatter_add(equation: Equation) -> list[Factor]:
    """The factors of a scatter-add.

    They are batch dims and dims of whole windows; along other dims updates are summed.
    """
    numbers = equation.params["dimension_numbers"]
    old, new = equation.invars[0].aval.shape, equation.invars[2].aval.shape
    windows = numbers.update_window_dims
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(old)) if d not in gone]
    batching = numbers.scatter_indices_batching_dims, numbers.operand_batching_dims
    paired = dict(zip(*batching, strict=True))
    found = [
        Factor({0: dim, 2: w}, dim)
        if old[dim] == new[w]
        else Factor({0: dim, 2: w}, None, "to some rows")
        for dim, w in zip(kept, windows, strict=True)
    ]
    scattered = [d for d in range(len(new)) if d not in windows]
    for index, update in enumerate(scattered):
        own = {1: index, 2: update}
        if index in paired:
            found.append(Factor({0: paired[index]} | own, paired[index]))
        else:
            found.append(Factor(own, None))
    rest = {*numbers.inserted_window_dims}
    return found + [Factor({0: dim}, None, "to rows") for dim in sorted(rest)]


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


def _attention(equation: Equation) -> list[Factor]:
    """The factors of an attention: examples, and heads.

    Heads are one only if there are as many heads of keys as of queries.
    """
    names, avals = equation.params["names"], [a.aval for a in equation.invars]
    is_whole = "over rows" if equation.params["spec"].dropout else ""
    grouped = "of groups of heads" if avals[0].shape[2] != avals[1].shape[2] else ""
    found, followed = [], set()
    for kind, (dim, why) in enumerate(((0, is_whole), (2, is_whole or grouped))):
        operands = dict.fromkeys(range(3), dim)
        for n, name in enumerate(names[3:], 3):
            place = ATTENTION_DIMS[name][kind]
            if place is not None and avals[n].shape[place] > 1:
                operands[n] = place
        followed |= {*operands.items()}
        found.append(Factor(operands, None if why else dim, why))
    every = [(n, dim) for n, aval in enumerate(avals) for dim in range(aval.ndim)]
    others = [Factor({n: dim}, None, "over rows") for n, dim in every]
    return found + [f for f in others if followed.isdisjoint(f.operands.items())]


# Rules, traits, and the names that have them. The traits:
#   elementwise  entry i of results depends only on entry i of operands and on scalars
#   cheap        any segment may compute it again (`core.segment.order`)
#   fused        recomputed rather than saved, as cheap ones are: XLA fuses it into what
#                reads it; a reduction passes over memory, and its result is small
#   linear       in its only operand
#   flat         jax gives results no tangent, even if operands have one
#   cast         the same entries in another dtype; `same`: rounded, or marked, too
#   view         the same entries at other places
#   part         some entries of operands, at their dims
#   moving       combines entries along a dim: a result of equal shape means nothing
#   from_rows    a result can be made by row from the rows of its operands, as those of
#                elementwise ones can
#   choice       what is chosen by scores; `matmul`: matmuls, which residuals may drop
# A primitive that is missing is refused by strict users; it costs speed, memory or
# bytes elsewhere.
TABLE: tuple[tuple[Rule | None, str, str], ...] = (
    (
        _each,
        "elementwise cheap",
        """abs add and clamp cos div eq exp exp2 ge gt integer_pow le log lt max min mul
        ne not or pow real rem rsqrt select_n shift_left shift_right_arithmetic
        shift_right_logical sin sqrt square sub xor""",
    ),
    (_each, "elementwise cheap flat", "ceil floor round sign"),
    (_each, "elementwise cheap linear", "neg"),
    (_each, "elementwise cheap linear cast same", "convert_element_type copy"),
    (
        _each,
        "elementwise fused",
        """atan2 cbrt conj cosh erf erf_inv erfc expm1 imag is_finite log1p log2
        logistic nextafter one_minus_square sinh tan tanh""",
    ),
    (_each, "elementwise fused same", "reduce_precision"),
    (
        _each,
        "elementwise",
        "acos acosh add_any asin asinh atan atanh complex digamma lgamma",
    ),
    (_each, "cheap flat same", "stop_gradient"),
    (_each, "same", "sharding_constraint"),
    (None, "same", "optimization_barrier"),
    (_broadcast, "from_rows cheap linear view", "broadcast_in_dim"),
    (_transpose, "cheap linear view moving", "transpose"),
    (_squeeze, "cheap linear view", "squeeze"),
    (_reshape, "cheap linear view moving", "reshape"),
    (_slice, "cheap part", "slice"),
    (_slice, "part", "dynamic_slice"),
    (_pad, "cheap part", "pad"),
    (_rev, "cheap", "rev"),
    (_along("dimension"), "cheap part", "concatenate"),
    (_stack, "cheap", "stack"),
    (_unstack, "", "unstack"),
    (_along("axis"), "fused", "split"),
    (_along("axis"), "", "cumsum cumlogsumexp cummax cummin cumprod"),
    (_along("dimension"), "choice", "sort"),
    (_along("axis", "reduction_dimension"), "choice", "top_k approx_top_k"),
    (_reduce_sum, "linear", "reduce_sum"),
    (_reduce, "choice", "reduce_max argmax"),
    (_reduce, "", "reduce_min reduce_prod reduce_and reduce_or argmin"),
    (_dot, "moving matmul", "dot_general"),
    (None, "matmul", "conv_general_dilated"),
    (_gather, "moving", "gather"),
    (_scatter_add, "from_rows moving", "scatter-add"),
    (_attention, "", "attention"),
    (None, "cheap", "iota"),
    (None, "fused", "bitcast_convert_type random_unwrap random_wrap"),
)
# Ends of messages: what operands by row along dims of different factors would mix.
MIXED = {
    "dot_general": "of rows with other rows",
    "gather": "from rows by other rows",
    "scatter-add": "of rows to other rows",
    "attention": "of rows with other rows",
}
RULES = {name: rule for rule, _, names in TABLE if rule for name in names.split()}
# The parameter that has the sizes of the results, or of what is read.
SIZE_PARAMS = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "iota": "shape",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
    "gather": "slice_sizes",
}


def having(trait: str) -> frozenset[str]:
    """The names of the primitives with a trait."""
    rows = (names for _, traits, names in TABLE if trait in traits.split())
    return frozenset(name for names in rows for name in names.split())


ELEMENTWISE, CASTS, SAME = having("elementwise"), having("cast"), having("same")
VIEWS, PARTS, MOVING = having("view"), having("part"), having("moving")
CHEAP, FLAT, LINEAR = having("cheap"), having("flat"), having("linear")
FROM_ROWS = ELEMENTWISE | having("from_rows")
