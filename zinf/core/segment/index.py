"""Makes layers equal that read different places of a table: `keys[i]` in layer i.

A slice has its place as a parameter of the equation, in which layers differ. A dynamic
slice has it as literals, which equal layers pass as arguments.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from zinf.core.jaxpr import Graph, variables
from zinf.core.jaxpr.compat import Equation, Var
from zinf.core.jaxpr.graph import variable_bytes
from zinf.core.jaxpr.static_slice import at_places, is_dense
from zinf.core.segment.order import SMALL_BYTES


def index_by_literals(graph: Graph, params: Iterable[Var]) -> Graph:
    """The same program, with dynamic slices of small values.

    Values that depend on a parameter keep their slices: they have derivatives, and rows
    of a parameter are arrays of their own. So do large values, of which a slice costs
    nothing where it is computed.
    """
    depends = set(params)
    equations = []
    for equation in graph.equations:
        if not depends.isdisjoint(variables(equation.invars)):
            depends.update(equation.outvars)
        elif _is_small_slice(equation):
            # Unsigned, so that jax adds no equations for places counted from the end.
            equation = at_places(equation, np.uint32)
        equations.append(equation)
    return replace(graph, equations=tuple(equations))


def _is_small_slice(equation: Equation) -> bool:
    operands = variables(equation.invars)
    is_small = all(variable_bytes(v) <= SMALL_BYTES for v in operands)
    return is_dense(equation) and bool(operands) and is_small
