"""A flat program: equations without calls, over variables.

`flatten` inlines calls and unrolls scans over stacked inputs, so that one list of
equations shows the whole program. Each inlined jaxpr gets fresh variables, since jax
shares one jaxpr object between equal calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.compat import (
    Atom,
    Equation,
    Literal,
    Var,
    build_jaxpr,
    evaluate,
    fresh,
    literal,
    open_jaxpr,
    scan_arity,
)
from zinf.core.jaxpr.emit import Emitter, renamed
from zinf.core.jaxpr.primitives import CASTS
from zinf.core.jaxpr.walk import CALLS, CUSTOM, REMAT

UNCHANGED = CASTS | {"stop_gradient"}


@dataclass(frozen=True)
class Graph:
    """A call-free program; `consts` holds the arrays that the function closed over."""

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    consts: dict[Var, Any]

    def needed_for(self, outvars: Sequence[Atom]) -> "Graph":
        """The program for only these outputs: dead code is gone, effects stay."""
        kept, needed = [], set(variables(outvars))
        for equation in reversed(self.equations):
            if equation.effects or not needed.isdisjoint(equation.outvars):
                kept.append(equation)
                needed.update(variables(equation.invars))
        consts = {v: x for v, x in self.consts.items() if v in needed}
        return Graph(self.invars, tuple(outvars), tuple(reversed(kept)), consts)

    def reading(self, names: Mapping[Var, Atom]) -> "Graph":
        """The program that reads the atoms of `names` in place of some variables."""
        equations = (e.replace(invars=renamed(e.invars, names)) for e in self.equations)
        outvars = tuple(renamed(self.outvars, names))
        return Graph(self.invars, outvars, tuple(equations), self.consts)

    def used_invars(self) -> tuple[Var, ...]:
        """The inputs that an equation or an output reads, in their own order."""
        read = set(variables(self.outvars))
        for equation in self.equations:
            read.update(variables(equation.invars))
        return tuple(v for v in self.invars if v in read)

    def __call__(self, *arguments: Any) -> list[Any]:
        """Evaluates the program on one value per invar; traceable."""
        jaxpr = build_jaxpr((*self.consts, *self.invars), self.outvars, self.equations)
        return evaluate(jaxpr, (*self.consts.values(), *arguments))


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]


def flatten(
    closed: Any,
    *,
    inline_remat: Callable[[Equation], bool] = lambda equation: False,
    stacked: Sequence[Var] = (),
) -> Graph:
    """The flat program of a closed jaxpr.

    Args:
        inline_remat: whether to inline a `jax.checkpoint` equation, whose inputs are
            already atoms of the flat program.
        stacked: inputs that may be stacked over layers. A scan over one of them is
            unrolled to one copy of its body for each iteration.
    """
    return written(_Flattener(inline_remat, frozenset(stacked)), closed)


def inline_all(closed: Any) -> Graph:
    """The flat program of a closed jaxpr that is not differentiated afterwards.

    `custom_jvp`, `custom_vjp` and `jax.checkpoint` are inlined too.
    """
    return written(_Inliner(), closed)


def inlined(graph: Graph) -> Graph:
    """`inline_all` of a flat program; it has the same inputs."""
    emitter = _Inliner()
    emitter.consts.update(graph.consts)
    jaxpr = build_jaxpr(graph.invars, graph.outvars, graph.equations)
    outvars = emitter.inline(jaxpr, {v: v for v in graph.invars})
    equations = tuple(emitter.equations)
    return Graph(graph.invars, tuple(outvars), equations, emitter.consts)


def written(emitter: Emitter, closed: Any) -> Graph:
    """The program that an emitter writes for a closed jaxpr, without dead code."""
    jaxpr, consts = open_jaxpr(closed)
    emitter.consts.update(zip(jaxpr.constvars, consts, strict=True))
    outvars = emitter.inline(jaxpr, {v: v for v in jaxpr.invars})
    equations = tuple(emitter.equations)
    graph = Graph(tuple(jaxpr.invars), tuple(outvars), equations, emitter.consts)
    return graph.needed_for(graph.outvars)


class _Inliner(Emitter):
    inlines = CALLS | CUSTOM | REMAT


class _Flattener(Emitter):
    def __init__(self, inline_remat: Callable, stacked: frozenset[Var]):
        super().__init__()
        self.producer: dict[Var, Equation] = {}
        self.inline_remat = inline_remat
        self.stacked = stacked

    def emit(self, equation: Equation, arguments: list[Atom]) -> list[Atom]:
        equation = equation.replace(invars=arguments)
        name = equation.primitive.name
        if name in REMAT and self.inline_remat(equation):
            return self.call(equation.params["jaxpr"], arguments)
        if name == "scan" and self.reads_stacked(equation):
            return self.unroll(equation)
        return super().emit(equation, arguments)

    def append(self, equation: Equation) -> list[Atom]:
        outvars = super().append(equation)
        self.producer.update(dict.fromkeys(outvars, self.equations[-1]))
        return outvars

    # Scans over stacked parameters.

    def reads_stacked(self, equation: Equation) -> bool:
        if not equation.params["length"]:
            return False  # Unrolling could not make the empty stacks of results.
        num_consts, num_carry = scan_arity(equation)
        rows = equation.invars[num_consts + num_carry :]
        return any(self.origin(a) is not None for a in rows)

    def origin(self, atom: Atom) -> tuple[Var, list[Equation]] | None:
        """The stacked input that `atom` is a cast of, with the casts; else None."""
        casts: list[Equation] = []
        while not isinstance(atom, Literal) and atom not in self.stacked:
            equation = self.producer.get(atom)
            if equation is None or equation.primitive.name not in UNCHANGED:
                return None
            casts.append(equation)
            (atom,) = equation.invars
        return None if isinstance(atom, Literal) else (atom, casts[::-1])

    def row(self, atom: Atom, index: int) -> Atom:
        """Row `index` of a scanned input.

        A row of a stacked parameter is a static slice, which `segment` turns into an
        array of its own; casts come after the slice. For other inputs the index is a
        literal, which `share` hoists, so that all iterations can share one body.
        """
        found = self.origin(atom)
        if found is None:
            number = literal(np.int32(index))
            return self.apply(
                lambda x, i: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False),
                atom,
                number,
            )[0]
        variable, casts = found
        (value,) = self.apply(
            lambda x: jax.lax.slice_in_dim(x, index, index + 1), variable
        )
        for cast in casts:
            out = fresh(cast.outvars[0].aval.update(shape=value.aval.shape))
            (value,) = self.append(cast.replace(invars=[value], outvars=[out]))
        return self.apply(lambda x: jax.lax.squeeze(x, (0,)), value)[0]

    def unroll(self, equation: Equation) -> list[Atom]:
        num_consts, num_carry = scan_arity(equation)
        consts = equation.invars[:num_consts]
        carry = equation.invars[num_consts : num_consts + num_carry]
        scanned = equation.invars[num_consts + num_carry :]
        length = equation.params["length"]
        order = range(length)
        collected: dict[int, list[Atom]] = {}
        for i in reversed(order) if equation.params["reverse"] else order:
            rows = [self.row(a, i) for a in scanned]
            results = self.call(equation.params["jaxpr"], [*consts, *carry, *rows])
            carry, collected[i] = results[:num_carry], results[num_carry:]
        columns = zip(*(collected[i] for i in order), strict=True)
        stacks = [self.apply(lambda *ys: jnp.stack(ys), *ys)[0] for ys in columns]
        return [*carry, *stacks]


def variable_bytes(variable: Var) -> int:
    """Bytes of a variable; typed random keys count as their 32-bit words."""
    return prod(variable.aval.shape) * variable.aval.dtype.itemsize
