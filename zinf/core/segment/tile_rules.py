"""Rewrites an equation that has one operand in pieces along a dim.

Either its result is in pieces too (a cast, a transpose), or it joins the pieces: it
sums over a contracted dim, and concatenates along any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr import Emitter
from zinf.core.jaxpr.compat import Atom, Equation, fresh, literal
from zinf.core.jaxpr.dims import NotByRow, factor_of, resized_params
from zinf.core.jaxpr.primitives import ELEMENTWISE

SUMMED = "contracted"
BESIDE = "side by side"
LOOKED_UP = "looked up"


class Untileable(Exception):
    """Why an equation cannot read an operand in pieces, for a message to the user."""


@dataclass(frozen=True)
class Split:
    """Pieces of a value along `dim`, between `edges` (from 0 to its size)."""

    dim: int
    edges: tuple[int, ...]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(pairwise(self.edges))


def follow(equation: Equation, number: int, split: Split) -> Split | str:
    """How the result is split when operand `number` is, or how pieces are joined.

    Raises:
        Untileable: it needs the operand as a whole.
    """
    name = equation.primitive.name
    if name == "dot_general":
        is_free = factor_of(equation, {number: split.dim}).result is not None
        return BESIDE if is_free else SUMMED
    if name == "gather":
        return _check_lookup(equation, number, split)
    if name in ELEMENTWISE or name in MOVES:
        return _moved(equation, number, split)
    raise Untileable(f"`{name}` needs it as a whole")


def result_split(equation: Equation, number: int, split: Split) -> Split:
    """How the result of a matmul that does not contract the pieces is split."""
    dim = factor_of(equation, {number: split.dim}).result
    assert dim is not None
    return Split(dim, split.edges)


def write(
    emitter: Emitter,
    equation: Equation,
    number: int,
    split: Split,
    pieces: Sequence[Atom],
) -> list[Atom]:
    """Writes an equation for pieces of an operand: pieces of its result, or one."""
    result = follow(equation, number, split)
    if isinstance(result, Split):
        return _write_pieces(emitter, equation, number, split, result, pieces)
    if result == LOOKED_UP:
        return [_write_lookup(emitter, equation, split, pieces)]
    if result == SUMMED:
        return [_write_sum(emitter, equation, number, split, pieces)]
    return [_write_beside(emitter, equation, number, split, pieces)]


# Equations whose result is in pieces: elementwise ones, and these, with the reason why
# one may need all rows.
MOVES = {
    "stop_gradient": "",
    "transpose": "",
    "squeeze": "",
    "broadcast_in_dim": "it is broadcast along its rows",
    "slice": "only some of its rows are read",
    "reshape": "it is reshaped from {old} to {new}, across tiles",
}


def _moved(equation: Equation, number: int, split: Split) -> Split:
    """The pieces' place in the result: rows may be merged, or split into groups."""
    name, old = equation.primitive.name, equation.invars[0].aval.shape
    new = equation.outvars[0].aval.shape
    reason = MOVES.get(name, f"`{name}` needs it as a whole")
    reason = reason.format(old=list(old), new=list(new))
    try:
        dim = factor_of(equation, {number: split.dim}).result
    except NotByRow:
        raise Untileable(reason) from None
    assert dim is not None
    edges = [divmod(edge * new[dim], split.edges[-1]) for edge in split.edges]
    if any(rest for _, rest in edges):
        raise Untileable(reason)
    return Split(dim, tuple(edge for edge, _ in edges))


def _write_pieces(
    emitter: Emitter,
    equation: Equation,
    number: int,
    before: Split,
    after: Split,
    pieces: Sequence[Atom],
) -> list[Atom]:
    return [
        write_piece(emitter, equation, number, before, after, index, piece)
        for index, piece in enumerate(pieces)
    ]


def write_piece(
    emitter: Emitter,
    equation: Equation,
    number: int,
    before: Split,
    after: Split,
    index: int,
    piece: Atom,
) -> Atom:
    """Writes an equation for piece `index` of its operand `number`.

    Args:
        before, after: how the operand and the result are split.
    """
    (out,) = equation.outvars
    low, high = after.ranges[index]
    shape = list(out.aval.shape)
    shape[after.dim] = high - low
    part = fresh(out.aval.update(shape=tuple(shape)))
    invars = _operands(emitter, equation, number, before, index, piece)
    params = resized_params(equation, after.dim, high - low)
    changed = equation.replace(invars=invars, outvars=[part], params=params)
    return emitter.append(changed)[0]


def _operands(
    emitter: Emitter,
    equation: Equation,
    number: int,
    split: Split,
    index: int,
    piece: Atom,
) -> list[Atom]:
    """The operands for piece `index` of operand `number`: their entries along it."""
    start, stop = split.ranges[index]
    dims = factor_of(equation, {number: split.dim}).operands

    def part(n: int, atom: Atom) -> Atom:
        if n == number or n not in dims:
            return piece if n == number else atom
        cut = partial(jax.lax.slice_in_dim, axis=dims[n])
        return emitter.apply(partial(cut, start_index=start, limit_index=stop), atom)[0]

    return [part(n, atom) for n, atom in enumerate(equation.invars)]


# Matmuls.


def _write_beside(
    emitter: Emitter,
    equation: Equation,
    number: int,
    split: Split,
    pieces: Sequence[Atom],
) -> Atom:
    after = result_split(equation, number, split)
    parts = _write_pieces(emitter, equation, number, split, after, pieces)
    (joined,) = emitter.apply(lambda *ys: jnp.concatenate(ys, after.dim), *parts)
    return joined


def _write_sum(
    emitter: Emitter,
    equation: Equation,
    number: int,
    split: Split,
    pieces: Sequence[Atom],
) -> Atom:
    """Sums the matmuls in order, in float32 if the result is narrower."""
    dtype = equation.outvars[0].aval.dtype
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    params = {**equation.params, "preferred_element_type": dtype}
    matmul = partial(jax.lax.dot_general, **_dot_arguments(params))
    if is_narrow:
        matmul = _in_float32(matmul)
    total: Atom | None = None
    for index, piece in enumerate(pieces):
        operands = _operands(emitter, equation, number, split, index, piece)
        (part,) = emitter.apply(matmul, *operands)
        if total is None:
            total = part
        else:
            (total,) = emitter.apply(jax.lax.add, total, part)
    assert total is not None
    if is_narrow:
        cast = partial(jax.lax.convert_element_type, new_dtype=dtype)
        (total,) = emitter.apply(cast, total)
    return total


def _dot_arguments(params: dict[str, Any]) -> dict[str, Any]:
    names = ("dimension_numbers", "precision", "preferred_element_type", "out_sharding")
    return {name: params[name] for name in names if name in params}


def _in_float32(matmul: Callable) -> Callable:
    """A matmul that is not rounded, with the derivatives of the rounded one.

    The cotangent comes from a cast of the sum, so the narrow dtype holds it exactly.
    jax's own rule would multiply float32 by narrow operands.
    """

    @jax.custom_vjp
    def wide(x: jax.Array, y: jax.Array) -> jax.Array:
        return matmul(x, y, preferred_element_type=jnp.float32)

    def forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple]:
        return wide(x, y), (x, y)

    def backward(operands: tuple, cotangent: jax.Array) -> tuple:
        result, vjp = jax.vjp(matmul, *operands)
        return vjp(cotangent.astype(result.dtype))

    wide.defvjp(forward, backward)
    return wide


# Look-ups of rows, as of embeddings.


def _check_lookup(equation: Equation, number: int, split: Split) -> str:
    shape = equation.invars[0].aval.shape
    numbers = equation.params["dimension_numbers"]
    is_rows = (
        number == 0
        and split.dim == 0
        and tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(equation.params["slice_sizes"]) == (1, *shape[1:])
    )
    if not is_rows:
        raise Untileable("`gather` reads more of it than whole rows")
    return LOOKED_UP


def _write_lookup(
    emitter: Emitter, equation: Equation, split: Split, pieces: Sequence[Atom]
) -> Atom:
    """Each tile gives the rows that it has; rows of no tile get jax's fill value.

    Where jax's mode promises that indices are in bounds, XLA reads the nearest row for
    one that is not, and its derivative drops that row.
    """
    (out,) = equation.outvars
    indices = equation.invars[1]
    numbers = equation.params["dimension_numbers"]
    mode = jax.lax.GatherScatterMode.from_any(equation.params["mode"])
    fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    is_promised = mode == jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    num_rows = split.edges[-1]

    def wide(i: jax.Array) -> jax.Array:
        return i if i.dtype.itemsize == 8 else i.astype(jnp.int32)

    (indices,) = emitter.apply(wide, indices)
    batch = [d for d in range(out.aval.ndim) if d not in numbers.offset_dims]

    def look_up(
        so_far: jax.Array, tile: jax.Array, i: jax.Array, start: jax.Array
    ) -> jax.Array:
        nearest = i if fills else jnp.clip(i, 0, num_rows - 1)
        size, local = tile.shape[0], nearest - start.astype(i.dtype)
        inside = (local >= 0) & (local < size)
        found = jax.lax.gather(
            tile,
            jnp.where(inside, local, 0),
            numbers,
            equation.params["slice_sizes"],
            mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        if is_promised:
            in_bounds = spread(nearest == i)
            found = jnp.where(in_bounds, found, jax.lax.stop_gradient(found))
        return jnp.where(spread(inside), found, so_far)

    def spread(flags: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(flags[..., 0], out.aval.shape, batch)

    fill = equation.params["fill_value"] if fills else 0

    def nothing() -> jax.Array:
        return jnp.full(out.aval.shape, fill, out.aval.dtype)

    (total,) = emitter.apply(nothing)
    for piece, (start, _) in zip(pieces, split.ranges, strict=True):
        # A literal becomes an argument of the code, so that equal tiles share the code.
        place = literal(np.int32(start))
        (total,) = emitter.apply(look_up, total, piece, indices, place)
    return total
