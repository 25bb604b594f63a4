"""Makes layers equal that read different places of a table: `keys[i]` in layer i.

A slice has its place as a parameter of the equation, in which layers differ. A dynamic
slice has it as literals, which equal layers pass as arguments.
"""

from collections.abc import Iterable
from dataclasses import replace

import jax
import numpy as np

from zinf.core.jaxpr import Graph, abstract, trace, variables
from zinf.core.jaxpr.compat import Equation, Var, literal, open_jaxpr
from zinf.core.jaxpr.graph import variable_bytes
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
            equation = _dynamic(equation)
        equations.append(equation)
    return replace(graph, equations=tuple(equations))


def _is_small_slice(equation: Equation) -> bool:
    if equation.primitive.name != "slice" or not variables(equation.invars):
        return False
    strides = equation.params["strides"]
    is_dense = strides is None or all(s == 1 for s in strides)
    return is_dense and variable_bytes(equation.invars[0]) <= SMALL_BYTES


def _dynamic(equation: Equation) -> Equation:
    (operand,), (out,) = equation.invars, equation.outvars
    # Unsigned, so that jax adds no equations for places counted from the end.
    starts = [literal(np.uint32(i)) for i in equation.params["start_indices"]]

    def function(x: jax.Array, *starts: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(x, starts, out.aval.shape)

    closed, _ = trace(function, *(abstract(a.aval) for a in (operand, *starts)))
    (dynamic,) = open_jaxpr(closed)[0].eqns
    return dynamic.replace(invars=[operand, *starts], outvars=[out])
