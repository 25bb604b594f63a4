"""Leaves that are stacked over layers become one array a row.

`lax.scan` over stacked parameters, once unrolled, and a Python loop over `params[i]`
both read a leaf by rows of its leading dim only. Such a leaf is never whole on the
device: each row is an array of its own, and only its layer fetches it.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from zinf.core.jaxpr import Emitter, Graph
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, fresh
from zinf.core.jaxpr.static_slice import is_dense
from zinf.core.problem.source import Source
from zinf.core.program import ArrayId, Role


def read_by_row(graph: Graph, leaves: Mapping[Var, str]) -> frozenset[str]:
    """The paths of the leaves that are read by single rows only: stacks of layers."""
    return frozenset(leaves[v] for v in _row_reads(graph, leaves))


def split_rows(
    graph: Graph, leaves: Mapping[Var, str], splittable: Collection[str]
) -> tuple[Graph, dict[Var, ArrayId], set[str]]:
    """Replaces leaves in `splittable` that are read only by rows.

    Returns:
        The graph, whose extra invars are the rows; the array that each leaf or row
        variable stands for; and the paths of the leaves that were split.
    """
    reads = _row_reads(graph, leaves)
    split = {v: s for v, s in reads.items() if leaves[v] in splittable}
    arrays = {v: ArrayId(Role.PARAM, p) for v, p in leaves.items() if v not in split}
    chosen: dict[ArrayId, Var] = {}
    renamed: dict[Var, Var] = {}
    for variable, equations in split.items():
        for equation in equations:
            row = _row(equation)
            assert row is not None
            (out,) = equation.outvars
            array = ArrayId(Role.PARAM, leaves[variable], (row, row + 1))
            renamed[out] = chosen.setdefault(array, out)
        # Rows that nothing reads belong to the leaf too: they have an update.
        unread = variable.aval.update(shape=(1, *variable.aval.shape[1:]))
        for row in range(variable.aval.shape[0]):
            array = ArrayId(Role.PARAM, leaves[variable], (row, row + 1))
            chosen.setdefault(array, fresh(unread))
    arrays.update({variable: array for array, variable in chosen.items()})

    read = graph.reading(renamed)
    kept = [e for e in read.equations if renamed.keys().isdisjoint(e.outvars)]
    invars = [v for v in graph.invars if v not in split]
    invars += sorted(chosen.values(), key=lambda v: str(arrays[v]))
    paths = {leaves[v] for v in split}
    graph = Graph(tuple(invars), read.outvars, tuple(kept), graph.consts)
    return graph, arrays, paths


def rest_by_row(source: Source, paths: Collection[str]) -> Source:
    """A function in which no equation reads a leaf of `paths` as a whole.

    Where one does, it reads the concatenation of the rows of the leaf. So a function
    may read a leaf as a whole that another function reads, and keeps, by row.
    """
    emitter = Emitter()
    wholes: dict[Var, Atom] = {}
    stacked = {v for v, path in source.params.items() if path in paths}

    def whole(atom: Atom) -> Atom:
        if isinstance(atom, Literal) or atom not in stacked:
            return atom
        if atom not in wholes:
            rows = [
                emitter.apply(lambda x, i=i: jax.lax.slice_in_dim(x, i, i + 1), atom)[0]
                for i in range(atom.aval.shape[0])
            ]
            (wholes[atom],) = emitter.apply(lambda *xs: jnp.concatenate(xs), *rows)
        return wholes[atom]

    graph = source.graph
    equations = [
        e if _row(e) is not None else e.replace(invars=[whole(a) for a in e.invars])
        for e in graph.equations
    ]
    outvars = tuple(whole(a) for a in graph.outvars)
    written = (*emitter.equations, *equations)
    return replace(
        source, graph=replace(graph, outvars=outvars, equations=tuple(written))
    )


def _row_reads(graph: Graph, leaves: Mapping[Var, str]) -> dict[Var, list[Equation]]:
    """The reads of each leaf that is read by rows only."""
    whole: set[Var] = {a for a in graph.outvars if not isinstance(a, Literal)}
    slices: dict[Var, list[Equation]] = {}
    for equation in graph.equations:
        for atom in equation.invars:
            if isinstance(atom, Literal) or atom not in leaves:
                continue
            if _row(equation) is None:
                whole.add(atom)
            else:
                slices.setdefault(atom, []).append(equation)
    return {v: s for v, s in slices.items() if v not in whole}


def _row(equation: Equation) -> int | None:
    """The row that an equation slices out of its operand, or None."""
    if not is_dense(equation):
        return None
    (operand,) = equation.invars
    start = equation.params["start_indices"]
    limit = equation.params["limit_indices"]
    is_row = limit[0] == start[0] + 1 and not any(start[1:])
    is_full = tuple(limit[1:]) == operand.aval.shape[1:]
    is_stack = operand.aval.shape[0] > 1
    return start[0] if is_row and is_full and is_stack else None
