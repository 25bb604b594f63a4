"""Divides equations: those that run in place, and those that any segment recomputes.

An equation is *floating* when it is cheap and reads no activation: a cast or transpose
of a parameter, a mask, a broadcast bias. Each segment that reads the result of a
floating equation computes it itself. So these results are never carried across a cut,
and a model that casts all its parameters at the top still streams layer by layer. All
others are *anchored*, in their traced order.

A small value that depends on no parameter (a random key, a position, a counter) is
anchored: carrying it costs nothing, and recomputing it in layer k would cost k
equations if each layer derives its own from the one before.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from zinf.core.jaxpr import Graph, variables
from zinf.core.jaxpr.compat import Atom, Equation, Var
from zinf.core.jaxpr.graph import variable_bytes
from zinf.core.jaxpr.primitives import CHEAP

SMALL_BYTES = 64 * 1024
MAX_FLOATING_DEPTH = 32

# Cheap if they read a parameter: scales of weights in few bits are stored as integers.
# What they make of random bits stays anchored.
CHEAP_OF_PARAMS = frozenset({"bitcast_convert_type"})


@dataclass(frozen=True)
class Order:
    """The anchored equations of a graph and what each needs from elsewhere."""

    graph: Graph
    anchored: tuple[Equation, ...]
    floating: dict[Var, int]  # variable -> position of its equation in the graph
    params: frozenset[Var]

    def closure(self, atoms: Iterable[Atom]) -> tuple[list[int], list[Var]]:
        """Floating equations behind `atoms` (positions, in order) and what those read.

        The second list holds the parameters, sources and anchored variables that
        `atoms` depend on through floating equations only.
        """
        positions: set[int] = set()
        roots: dict[Var, None] = {}
        stack = list(reversed(variables(atoms)))
        while stack:
            variable = stack.pop()
            position = self.floating.get(variable)
            if position is None:
                roots[variable] = None
            elif position not in positions:
                positions.add(position)
                invars = self.graph.equations[position].invars
                stack.extend(reversed(variables(invars)))
        return sorted(positions), list(roots)


def order_equations(graph: Graph, params: Iterable[Var]) -> Order:
    """Splits the equations of a graph into floating and anchored ones."""
    param_set = frozenset(params)
    of_params = set(param_set)  # floating values computed from a parameter
    depends = set(param_set)  # everything that depends on a parameter
    depth = dict.fromkeys((*graph.invars, *graph.consts), 0)
    floating: dict[Var, int] = {}
    anchored = []
    for position, equation in enumerate(graph.equations):
        reads = variables(equation.invars)
        level = 1 + max((depth.get(v, 0) for v in reads), default=0)
        from_params = any(v in of_params for v in reads)
        name = equation.primitive.name
        movable = (
            (name in CHEAP or from_params and name in CHEAP_OF_PARAMS)
            and not equation.effects
            and level <= MAX_FLOATING_DEPTH
            and all(v in of_params or v not in depends for v in reads)
        )
        is_large = any(variable_bytes(v) > SMALL_BYTES for v in equation.outvars)
        if any(v in depends for v in reads):
            depends.update(equation.outvars)
        if movable and (from_params or is_large):
            floating.update(dict.fromkeys(equation.outvars, position))
            depth.update(dict.fromkeys(equation.outvars, level))
            if from_params:
                of_params.update(equation.outvars)
        else:
            anchored.append(equation)
    return Order(graph, tuple(anchored), floating, param_set)
