"""Reads other arrays of the optimizer's state in place of parameters.

A forward pass may compute with averages of the weights. They rest in the dtype of the
optimizer's state; each segment casts those that it reads, so no copy of all of them is
ever made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from zinf.core.jaxpr import Emitter, Graph
from zinf.core.jaxpr.compat import Atom, Var, fresh
from zinf.core.program import ArrayId, Role


@dataclass(frozen=True, slots=True)
class StateArray:
    """An array of optimizer state with the shape of its leaf; `dtype` is its name."""

    slot: int
    dtype: str


Instead = Mapping[str, StateArray]
"""By the path of a leaf, the array that is read in place of its parameter."""
NOTHING: Instead = MappingProxyType({})


def read_instead(
    graph: Graph, arrays: Mapping[Var, ArrayId], instead: Instead
) -> tuple[Graph, dict[Var, ArrayId]]:
    """The program that reads state arrays, and the array that each variable stands for.

    Args:
        arrays: the array of each invar of `graph` that is a parameter, or rows of one.
    """
    emitter = Emitter()
    found: dict[Var, ArrayId] = {}
    inputs: dict[Var, Var] = {}
    read: dict[Var, Atom] = {}
    for variable, array in arrays.items():
        state = instead.get(array.path)
        if state is None:
            found[variable] = array
            continue
        stored = ArrayId(Role.STATE, array.path, array.rows, slot=state.slot)
        dtype = variable.aval.dtype
        if str(dtype) == state.dtype:
            found[variable] = stored
            continue
        inputs[variable] = fresh(variable.aval.update(dtype=state.dtype))
        found[inputs[variable]] = stored
        (read[variable],) = emitter.apply(
            lambda x, dtype=dtype: x.astype(dtype), inputs[variable]
        )

    graph = graph.reading(read)
    graph = replace(
        graph,
        invars=tuple(inputs.get(v, v) for v in graph.invars),
        equations=(*emitter.equations, *graph.equations),
    )
    return graph, found
