"""Slices hold what is behind an output, and merging changes no result."""

import jax
import jax.numpy as jnp
import numpy as np

from zinf.jaxpr import Graph, flatten, share, trace
from zinf.jaxpr.share import Piece
from zinf.jaxpr.slice import Slicer, merge_equal

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def names(equations):
    return [e.primitive.name for e in equations]


def test_a_slice_is_the_program_of_its_outputs():
    def function(a, b, c):
        d = jnp.sin(a) * b
        return jnp.cos(d), jnp.exp(c) + d

    graph = flatten(trace(function, *[SCALAR] * 3)[0])
    slicer = Slicer(graph)
    for n, wanted in enumerate([["sin", "mul", "cos"], ["exp", "sin", "mul", "add"]]):
        found = slicer.behind([graph.outvars[n]])
        assert sorted(names(found.equations)) == sorted(wanted)
        program = Graph(found.inputs, (graph.outvars[n],), found.equations, {})
        values = dict(zip(graph.invars, (0.1, 0.2, 0.3), strict=True))
        (result,) = program(*(values[v] for v in found.inputs))
        np.testing.assert_allclose(result, function(0.1, 0.2, 0.3)[n], rtol=1e-6)


def test_a_slice_stops_where_it_is_told():
    graph = flatten(trace(lambda a: jnp.exp(jnp.sin(a)), SCALAR)[0])
    (middle,) = graph.equations[0].outvars
    found = Slicer(graph).behind(graph.outvars, stop={middle})
    assert names(found.equations) == ["exp"]
    assert found.inputs == (middle,)


def test_slices_with_equal_code_list_corresponding_inputs_at_the_same_place():
    def function(a, b, c):
        return jnp.sin(a) / b, jnp.sin(c) / a

    graph = flatten(trace(function, *[SCALAR] * 3)[0])
    slicer = Slicer(graph)
    found = [slicer.behind([v]) for v in graph.outvars]
    pieces = [
        Piece(s.inputs, (v,), s.equations)
        for s, v in zip(found, graph.outvars, strict=True)
    ]
    first, second = share(pieces)
    assert first.body is second.body
    a, b, c = graph.invars
    assert [s.inputs for s in found] == [(a, b), (c, a)]


def test_equal_equations_are_computed_once_unless_they_are_kept():
    def function(a):
        return jnp.sin(a) + 2.0, jnp.sin(a) + 2.0, jnp.sin(a) + 3.0

    graph = flatten(trace(function, SCALAR)[0])
    merged = merge_equal(graph, set())
    assert names(merged.equations) == ["sin", "add", "add"]
    assert merged(0.5) == graph(0.5)
    kept = merge_equal(graph, set(graph.outvars))
    assert names(kept.equations) == ["sin", "add", "add", "add"]
