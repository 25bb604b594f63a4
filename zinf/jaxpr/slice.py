"""Cuts the equations behind a few outputs out of a graph, in time linear in the cut.

`Graph.needed_for` walks all equations. A program with one output per parameter leaf is
cut into thousands of pieces; each cut here walks only the piece that it finds.
"""

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zinf.jaxpr.compat import Atom, Equation, Literal, Var
from zinf.jaxpr.graph import Graph, variables
from zinf.jaxpr.share import equation_key


@dataclass(frozen=True)
class Slice:
    """Equations in program order, and the variables that they read from elsewhere.

    `inputs` are in the order of their first use, so that slices with equal code list
    corresponding inputs at the same place.
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
    """Finds equations that compute what an earlier one has computed.

    Attributes:
        results: by what an equation computes (`key`), the results of the first that
            does.
        renamed: results of later ones, to those of the first.
    """

    def __init__(self) -> None:
        self.results: dict[Hashable, list[Var]] = {}
        self.renamed: dict[Var, Var] = {}

    def rename(self, atoms: Sequence[Atom]) -> list[Atom]:
        return [a if isinstance(a, Literal) else self.renamed.get(a, a) for a in atoms]

    def key(self, equation: Equation) -> Hashable:
        arguments = tuple(_atom_key(a) for a in self.rename(equation.invars))
        return equation_key(equation), arguments

    def add(self, key: Hashable, equation: Equation) -> bool:
        """Takes an equation without effects; whether it is the first of its `key`."""
        if key not in self.results:
            self.results[key] = equation.outvars
            return True
        self.renamed.update(zip(equation.outvars, self.results[key], strict=True))
        return False


def merge_equal(graph: Graph, keep: Container[Var]) -> Graph:
    """The graph with equal equations computed once, but for results in `keep`."""
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
