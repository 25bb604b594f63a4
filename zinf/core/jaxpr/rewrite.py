"""Functions whose programs are written again whenever they are traced."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zinf.core.jaxpr.compat import Atom, open_jaxpr
from zinf.core.jaxpr.emit import Emitter, trace
from zinf.core.jaxpr.graph import Graph, written


def rewriting(
    function: Callable, write: Callable[[Any, Sequence[Any]], Graph]
) -> Callable:
    """A function that computes what `write` makes of the program of `function`.

    It is traceable only.

    Args:
        write: `(closed jaxpr, arguments of function)`: another program with the same
            inputs and outputs.
    """

    def rewritten(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = [weakly_typed(jax.typeof(x)) for x in leaves]
        closed, shapes = trace(function, *jax.tree.unflatten(structure, specs))
        outputs = write(closed, arguments)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return rewritten


def rewritten_program(emitter: Emitter, program: Any) -> tuple[Any, tuple[Atom, ...]]:
    """A program as an emitter writes it: a closed jaxpr, and the emitter's outputs."""
    graph = written(emitter, program)
    specs = [weakly_typed(v.aval) for v in graph.invars]
    return trace(graph, *specs)[0], graph.outvars


def weakly_typed(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a value, weak if its own is."""
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def as_graph(closed: Any) -> Graph:
    """A program as it is, with its calls."""
    jaxpr, consts = open_jaxpr(closed)
    named = dict(zip(jaxpr.constvars, consts, strict=True))
    return Graph(tuple(jaxpr.invars), tuple(jaxpr.outvars), tuple(jaxpr.eqns), named)
