"""Finds the equations behind a few outputs, in time linear in their number.

`Graph.needed_for` walks all equations of a graph. A program with one output for each
parameter leaf is sliced into thousands of pieces, so a `Slicer` walks only the
equations that it finds.
"""

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var
from zinf.core.jaxpr.emit import renamed
from zinf.core.jaxpr.graph import Graph, variables
from zinf.core.jaxpr.share import equation_key


@dataclass(frozen=True)
class Slice:
    """Equations in program order, and the variables that they read but do not define.

    `inputs` are in the order of first use, so slices with equal code have corresponding
    inputs at the same position.
    """

    equations: tuple[Equation, ...]
    inputs: tuple[Var, ...]


class Slicer:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.producer = {v: n for n, e in enumerate(graph.equations) for v in e.outvars}

    def behind(self, outvars: Sequence[Atom], *, stop: Container[Var] = ()) -> Slice:
        """The equations that compute `outvars` from inputs, constants and `stop`."""
        positions: set[int] = set()
        stack = variables(outvars)
        while stack:
            variable = stack.pop()
            position = self.producer.get(variable)
            if variable in stop or position is None or position in positions:
                continue
            positions.add(position)
            stack += variables(self.graph.equations[position].invars)
        equations = tuple(self.graph.equations[n] for n in sorted(positions))
        made = {v for e in equations for v in e.outvars if v not in stop}
        read = [v for e in equations for v in variables(e.invars)] + variables(outvars)
        return Slice(equations, tuple(dict.fromkeys(v for v in read if v not in made)))


class EqualEquations:
    """Finds equations that compute the same values as an earlier one.

    Attributes:
        results: the results of the first equation with each `key`.
        renamed: the results of later equal equations, mapped to those of the first.
    """

    def __init__(self) -> None:
        self.results: dict[Hashable, list[Var]] = {}
        self.renamed: dict[Var, Var] = {}

    def rename(self, atoms: Sequence[Atom]) -> list[Atom]:
        return renamed(atoms, self.renamed)

    def key(self, equation: Equation) -> Hashable:
        arguments = tuple(_atom_key(a) for a in self.rename(equation.invars))
        return equation_key(equation), arguments

    def add(self, key: Hashable, equation: Equation) -> bool:
        """Adds an equation without effects; returns whether `key` is new."""
        if key not in self.results:
            self.results[key] = equation.outvars
            return True
        self.renamed.update(zip(equation.outvars, self.results[key], strict=True))
        return False


def merge_equal(graph: Graph, keep: Container[Var]) -> Graph:
    """The graph with equal equations computed once, except results in `keep`."""
    equal = EqualEquations()
    equations = []
    for equation in graph.equations:
        is_kept = equation.effects or equation.outvars[0] in keep
        if is_kept or equal.add(equal.key(equation), equation):
            equations.append(equation.replace(invars=equal.rename(equation.invars)))
    outvars = tuple(equal.rename(graph.outvars))
    return replace(graph, outvars=outvars, equations=tuple(equations))


def _atom_key(atom: Atom) -> Hashable:
    if not isinstance(atom, Literal):
        return atom
    value = np.asarray(atom.val)
    return str(value.dtype), value.shape, value.tobytes()
