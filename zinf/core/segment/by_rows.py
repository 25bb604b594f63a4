"""Runs a function a block of rows at a time, where its rows are independent.

Activations of a long sequence can be larger than the device: the hidden layer of an
MLP, the logits of a language model. Where the jaxpr shows that rows (tokens, samples)
are independent up to sums over them, blocks of rows run in a loop, and only one block's
intermediate values exist at a time. Arctic Long Sequence Training (arXiv:2506.13996,
section 3.1) tiles MLP, logits and loss by hand in this way.

An attention, or the loops of its derivative, is a barrier: it runs whole, between a
loop over the blocks that it reads and a loop that reads its results by block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr import Graph, inline_all, trace, variables
from zinf.core.jaxpr.compat import (
    Atom,
    Equation,
    Literal,
    Var,
    build_jaxpr,
    evaluate,
    fresh,
)
from zinf.core.jaxpr.dims import NotByRow, factor_of, is_opaque, resized_params, sources
from zinf.core.jaxpr.graph import variable_bytes
from zinf.core.jaxpr.slice import Slicer
from zinf.core.segment.row_sums import is_zeros


def by_rows(
    function: Callable,
    arguments: Any,
    may_be_rows: Sequence[Mapping[int, int]],
    num_blocks: int,
) -> Callable:
    """The function, computed in blocks of rows.

    Rows that are divided among devices stay where they are: each block has some rows
    of every device.

    Args:
        arguments: a pytree of shapes and dtypes, for `function(*arguments)`.
        may_be_rows: for each leaf, the dims that may be divided into blocks, and among
            how many devices each is divided.
        num_blocks: the least number of blocks, if a divisor of the rows is as large.

    Raises:
        NotByRow: an equation needs all rows at once; the message says which.
    """
    closed, results = trace(function, *arguments)
    graph = inline_all(closed)
    structure = jax.tree.structure(results)
    rows = _best(graph, may_be_rows, num_blocks)
    count = rows.blocks(num_blocks)

    def run(*arguments: Any) -> Any:
        leaves = rows.run(jax.tree.leaves(arguments), count)
        return jax.tree.unflatten(structure, leaves)

    return run


def _best(
    graph: Graph, may_be_rows: Sequence[Mapping[int, int]], num_blocks: int
) -> "RowWise":
    """Tries each dim of the largest argument; takes that with the smallest block.

    Of equal ones, that which is divided among the fewest devices.
    """
    flags = zip(graph.invars, may_be_rows, strict=True)
    candidates = {v: dims for v, dims in flags if dims}
    if not candidates:
        raise NotByRow("there is no argument with rows")
    largest = max(candidates, key=variable_bytes)
    found: list[RowWise] = []
    reasons = []
    own = candidates[largest]
    for dim in sorted(own, key=lambda d: (own[d], d)):
        size = largest.aval.shape[dim]
        seeds = {}
        for v, dims in candidates.items():
            same = [d for d in (dim, *sorted(dims)) if d in dims]
            fits = [d for d in same if v.aval.shape[d] == size]
            seeds.update({v: fits[0]} if fits else {})
        parts = max(candidates[v][d] for v, d in seeds.items())
        try:
            rows = _with_barriers_if_needed(graph, seeds, parts)
            if rows.blocks(num_blocks) == 1:
                raise NotByRow("the number of rows has no such divisor")
            found.append(rows)
        except NotByRow as error:
            reasons.append(f"along dim {dim}: {error}")
    if not found:
        raise NotByRow("; ".join(reasons))
    return min(found, key=lambda rows: rows.largest_bytes(rows.blocks(num_blocks)))


def _with_barriers_if_needed(
    graph: Graph, seeds: Mapping[Var, int], parts: int
) -> "RowWise":
    """Rows of a program, with barriers if it has an attention or a loop."""
    try:
        return RowWise(graph, seeds, parts)
    except NotByRow:
        if not any(map(is_opaque, graph.equations)):
            raise
        return RowWise(graph, seeds, parts, has_barriers=True)


@dataclass
class RowWise:
    """Which values of a program are by row, given the inputs (`seeds`) that are.

    Attributes:
        parts: a block has as many rows of each of so many equal parts of all rows.
        dims: values that are computed by block, and the dim of their rows.
        varying: of these, those that really differ between rows.
        sliced: values that are computed as wholes, and read by block.
        sums: values that are sums over all rows.
        phase: for every value, the number of loops over the rows that must end before
            it can be computed.
        has_barriers: whether an equation that needs all rows runs whole, between two
            loops. A product of rows with other rows never does: its result would have
            an element for each pair.
        joined: values that are computed by block and that a barrier reads whole.
    """

    graph: Graph
    seeds: Mapping[Var, int]
    parts: int = 1
    dims: dict[Var, int] = field(default_factory=dict)
    varying: set[Var] = field(default_factory=set)
    sliced: dict[Var, int] = field(default_factory=dict)
    sums: set[Var] = field(default_factory=set)
    phase: dict[Var, int] = field(default_factory=dict)
    has_barriers: bool = False
    joined: set[Var] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.producer = {v: e for e in self.graph.equations for v in e.outvars}
        self.dims.update(self.seeds)
        self.varying.update(self.seeds)
        self.phase.update(dict.fromkeys((*self.graph.invars, *self.graph.consts), 0))
        followed = [(e, self._follow(e)) for e in self.graph.equations]
        for equation, dims in followed:
            if dims and dims != self.dims_of(equation):
                raise NotByRow("a value is read both by row and as a whole")

    def _follow(self, equation: Equation) -> dict[int, int]:
        """Classifies the results of an equation; returns which operands are by row."""
        try:
            return self._follow_rows(equation)
        except NotByRow:
            may_be_whole = self.has_barriers or self._only_counts(equation)
            if not may_be_whole or equation.primitive.name == "dot_general":
                raise
            self._make_barrier(equation)
            return {}

    def _only_counts(self, equation: Equation) -> bool:
        """Whether an equation computes integers, and from arguments only.

        Labels that are moved by one token are small, and cost no loop as wholes.
        """
        reads = variables(equation.invars)
        are_at_hand = all(v not in self.dims or v in self.seeds for v in reads)
        return are_at_hand and all(
            jnp.issubdtype(v.aval.dtype, jnp.integer) for v in equation.outvars
        )

    def _make_barrier(self, equation: Equation) -> None:
        """Make an equation run whole, once the loops before it have ended."""
        reads = variables(equation.invars)
        blocked = [v for v in reads if v in self.dims and v not in self.seeds]
        self.joined.update(blocked)
        phase = max((self.phase[v] for v in reads), default=0)
        self.phase.update(dict.fromkeys(equation.outvars, phase + bool(blocked)))

    def _follow_rows(self, equation: Equation) -> dict[int, int]:
        dims = self.dims_of(equation)
        if not any(a in self.varying for a in variables(equation.invars)):
            dims = {}  # equal for all rows, even where it is read by row
        phase = max((self.phase[v] for v in variables(equation.invars)), default=0)
        if dims:
            factor = factor_of(equation, dims)
            for number, dim in factor.operands.items():
                self._demand(equation.invars[number], dim)
            dims = self.dims_of(equation)
            if factor.result is None:
                self._check_sum(equation)
                self.sums.update(equation.outvars)
                phase += 1
            else:
                self.dims.update(dict.fromkeys(equation.outvars, factor.result))
                self.varying.update(equation.outvars)
        self.phase.update(dict.fromkeys(equation.outvars, phase))
        return dims

    def dims_of(self, equation: Equation) -> dict[int, int]:
        return {
            n: self.dim_of(a)
            for n, a in enumerate(equation.invars)
            if self.dim_of(a) is not None
        }

    def dim_of(self, atom: Atom) -> Any:
        """The dim along which a value is read by block; None: it is read whole."""
        if isinstance(atom, Literal):
            return None
        return self.dims.get(atom, self.sliced.get(atom))

    def _demand(self, atom: Atom, dim: int) -> None:
        """Make a value that is equal for all rows available by row along `dim`.

        It is computed by row if its operands allow that, and sliced otherwise.
        """
        if isinstance(atom, Literal) or self.dim_of(atom) not in (None, dim):
            raise NotByRow("rows meet others")
        if self.dim_of(atom) == dim:
            return
        equation = self.producer.get(atom)
        operands = None if equation is None else sources(equation, dim)
        if equation is None or operands is None:
            self.sliced[atom] = dim
            return
        for number, operand_dim in operands.items():
            self._demand(equation.invars[number], operand_dim)
        self.dims[atom] = dim

    def _check_sum(self, equation: Equation) -> None:
        """Rows must be added to zeros, or each block would add the operand."""
        if equation.primitive.name != "scatter-add":
            return
        if not is_zeros(equation.invars[0], self.producer):
            raise NotByRow("`scatter-add` to what is not zero")

    # Number and size of blocks.

    @cached_property
    def _divisor(self) -> int:
        """Every possible number of blocks divides this."""
        found = {**self.dims, **self.sliced}
        divisor = gcd(*(v.aval.shape[dim] for v, dim in found.items()))
        return divisor // self.parts if divisor % self.parts == 0 else 1

    def blocks(self, least: int) -> int:
        """The smallest possible number of blocks from `least` on; else the largest."""
        divisors = [n for n in range(1, self._divisor + 1) if self._divisor % n == 0]
        return next((n for n in divisors if n >= least), divisors[-1])

    def largest_bytes(self, num_blocks: int) -> int:
        """Bytes of the largest intermediate value, of one block if it is by row."""
        made = [v for e in self.graph.equations for v in e.outvars]
        sizes = (
            variable_bytes(v) // (num_blocks if v in self.dims else 1) for v in made
        )
        return max(sizes, default=0)

    # Running.

    def run(self, arguments: Sequence[Any], num_blocks: int) -> list[Any]:
        """The outputs of the program; traceable."""
        values: dict[Var, Any] = dict(self.graph.consts)
        values.update(zip(self.graph.invars, arguments, strict=True))
        for phase in range(1 + max(self.phase.values())):
            self._run_wholes(values, phase)
            self._run_blocks(values, phase, num_blocks)
        return [
            jnp.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else values[a]
            for a in self.graph.outvars
        ]

    def _run_wholes(self, values: dict[Var, Any], phase: int) -> None:
        """Run this phase's equations that have no rows; XLA drops unused ones."""
        for equation in self.graph.equations:
            out, reads = equation.outvars[0], variables(equation.invars)
            is_whole = out not in self.varying and out not in self.sums
            if is_whole and self.phase[out] == phase:
                jaxpr = build_jaxpr(reads, equation.outvars, [equation])
                results = evaluate(jaxpr, [values[v] for v in reads])
                values.update(zip(equation.outvars, results, strict=True))

    def _run_blocks(self, values: dict[Var, Any], phase: int, num_blocks: int) -> None:
        """The loop whose sums and outputs need only values of this phase."""
        finals = {*variables(self.graph.outvars), *self.joined}
        made = [v for e in self.graph.equations for v in e.outvars]
        sums = [v for v in made if v in self.sums and self.phase[v] == phase + 1]
        outputs = [
            v for v in made if v in finals and v in self.dims and self.phase[v] == phase
        ]
        outputs = [v for v in outputs if v not in values]
        if not sums and not outputs:
            return
        # Values by block of an earlier loop are recomputed, but for those that a
        # barrier read: these are at hand.
        stop = {
            v
            for v in values
            if v not in self.dims or v in self.seeds or v in self.joined
        }
        piece = Slicer(self.graph).behind([*sums, *outputs], stop=stop)
        body = _Block(self, piece.equations, num_blocks)
        read = piece.inputs
        blocked = [v for v in read if self.dim_of(v) is not None]
        same = [v for v in read if v not in blocked]

        def step(totals: list[Any], blocks: list[Any]) -> tuple[list[Any], list[Any]]:
            known = dict(zip(blocked, blocks, strict=True))
            known.update((v, values[v]) for v in same)
            found = body.run(known, [*sums, *outputs])
            parts, rest = found[: len(sums)], found[len(sums) :]
            pairs = zip(totals, parts, strict=True)
            return [t + x.astype(t.dtype) for t, x in pairs], rest

        start = [jnp.zeros(v.aval.shape, _sum_dtype(v)) for v in sums]
        cut = num_blocks, self.parts
        xs = [_split(values[v], self.dim_of(v), *cut) for v in blocked]
        totals, blocks = jax.lax.scan(step, start, xs, length=num_blocks)
        for v, total in zip(sums, totals, strict=True):
            values[v] = total.astype(v.aval.dtype)
        for v, block in zip(outputs, blocks, strict=True):
            values[v] = _join(block, self.dims[v], self.parts)


class _Block:
    """Equations for one block of rows."""

    def __init__(self, rows: RowWise, equations: Sequence[Equation], num_blocks: int):
        self.rows, self.num_blocks = rows, num_blocks
        self.renamed: dict[Var, Var] = {}
        self.equations = [self._resize(e) for e in equations]

    def run(self, known: Mapping[Var, Any], wanted: Sequence[Var]) -> list[Any]:
        invars = [self._here(v) for v in known]
        outvars = [self._here(v) for v in wanted]
        jaxpr = build_jaxpr(invars, outvars, self.equations)
        return evaluate(jaxpr, list(known.values()))

    def _here(self, atom: Atom) -> Atom:
        """The aval of a value in one block: fewer rows, and sums in a wide dtype."""
        if isinstance(atom, Literal):
            return atom
        if atom not in self.renamed:
            aval, dim = atom.aval, self.rows.dim_of(atom)
            if dim is not None:
                shape = list(aval.shape)
                shape[dim] //= self.num_blocks
                aval = aval.update(shape=tuple(shape))
            self.renamed[atom] = fresh(aval)
        return self.renamed[atom]

    def _resize(self, equation: Equation) -> Equation:
        invars = [self._here(a) for a in equation.invars]
        outvars = [self._here(v) for v in equation.outvars]
        params, out = equation.params, equation.outvars[0]
        if out in self.rows.dims:
            dim = self.rows.dims[out]
            params = resized_params(equation, dim, outvars[0].aval.shape[dim])
        elif out in self.rows.sums and equation.primitive.name == "dot_general":
            wide = _sum_dtype(out)
            self.renamed[out] = fresh(out.aval.update(dtype=wide))
            outvars = [self.renamed[out]]
            params = {**params, "preferred_element_type": wide}
        return equation.replace(invars=invars, outvars=outvars, params=params)


def _sum_dtype(variable: Var) -> np.dtype:
    """float32 for sums that a narrower dtype would round at every block."""
    dtype = variable.aval.dtype
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if is_narrow else dtype


def _split(value: jax.Array, dim: int, num_blocks: int, parts: int) -> jax.Array:
    """Blocks of rows along a new leading dim; each has rows of all parts."""
    before, rows, after = value.shape[:dim], value.shape[dim], value.shape[dim + 1 :]
    size = rows // (num_blocks * parts)
    pieces = value.reshape((*before, parts, num_blocks, size, *after))
    blocks = jnp.moveaxis(pieces, dim + 1, 0)
    return blocks.reshape((num_blocks, *before, parts * size, *after))


def _join(blocks: jax.Array, dim: int, parts: int) -> jax.Array:
    """Joins what `_split` divided."""
    num_blocks, *shape = blocks.shape
    before, rows, after = shape[:dim], shape[dim], shape[dim + 1 :]
    pieces = blocks.reshape((num_blocks, *before, parts, rows // parts, *after))
    moved = jnp.moveaxis(pieces, 0, dim + 1)
    return moved.reshape((*before, num_blocks * rows, *after))
