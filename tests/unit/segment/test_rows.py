"""Leaves that are read by rows only become one array a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.jaxpr import flatten, trace
from zinf.jaxpr.compat import open_jaxpr
from zinf.program import ArrayId, Role
from zinf.segment.rows import read_by_row, split_rows

STACK = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((4,), jnp.float32)


def split(function, *specs, splittable=("w",), stack=STACK):
    closed, _ = trace(function, stack, *specs)
    leaf = open_jaxpr(closed)[0].invars[0]
    graph = flatten(closed, stacked=(leaf,))
    return leaf, split_rows(graph, {leaf: "w"}, splittable)


def stacked(function, *specs):
    closed, _ = trace(function, STACK, *specs)
    leaf = open_jaxpr(closed)[0].invars[0]
    return read_by_row(flatten(closed, stacked=(leaf,)), {leaf: "w"})


def rows(arrays):
    return sorted(a.rows for a in arrays.values() if a.rows)


def by_scan(w, x):
    return jax.lax.scan(lambda c, row: (jnp.tanh(row @ c), None), x, w)[0]


def by_reverse_scan(w, x):
    step = lambda c, row: (jnp.tanh(row @ c), None)  # noqa: E731
    return jax.lax.scan(step, x, w, reverse=True)[0]


def by_number(w, x):
    for i in range(len(w)):
        x = jnp.tanh(w[i] @ x)
    return x


def by_negative_number(w, x):
    for i in range(-3, 0):
        x = jnp.tanh(w[i] @ x)
    return x


def by_cast_scan(w, x):
    half = w.astype(jnp.bfloat16)
    return jax.lax.scan(lambda c, row: (row.astype("f4") @ c, None), x, half)[0]


@pytest.mark.parametrize(
    "function",
    [by_scan, by_reverse_scan, by_number, by_negative_number, by_cast_scan],
    ids=lambda f: f.__name__,
)
def test_a_leaf_read_by_rows_is_split_and_the_program_stays_the_same(function):
    leaf, (graph, arrays, paths) = split(function, X)
    assert paths == {"w"}
    assert rows(arrays) == [(0, 1), (1, 2), (2, 3)]
    assert leaf not in graph.invars and set(arrays) <= set(graph.invars)
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)
    x = jnp.ones(4)
    arguments = [w[slice(*arrays[v].rows)] if v in arrays else x for v in graph.invars]
    (found,) = graph(*arguments)
    np.testing.assert_allclose(found, function(w, x), rtol=1e-5, atol=1e-6)


def test_a_row_that_is_read_twice_is_one_array():
    def function(w, x):
        return w[1] @ (w[1] @ x) + w[0] @ x

    _, (graph, arrays, _) = split(function, X)
    assert rows(arrays) == [(0, 1), (1, 2), (2, 3)]
    assert len(graph.invars) == 4
    assert "slice" not in [e.primitive.name for e in graph.equations]


def is_whole(leaf, result):
    graph, arrays, paths = result
    return (
        leaf in graph.invars
        and arrays == {leaf: ArrayId(Role.PARAM, "w")}
        and not paths
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: by_scan(w, x) + w.sum(),
        lambda w, x: (by_scan(w, x), w),
        lambda w, x: w[0:2].sum() + w[2].sum(),
        lambda w, x: w[0, :, 1].sum() + w[1].sum(),
        lambda w, x: w.sum(),
    ],
    ids=["sum", "output", "two rows", "part of a row", "unsliced"],
)
def test_a_leaf_that_is_also_read_otherwise_is_not_split(function):
    assert is_whole(*split(function, X))


def test_a_leaf_whose_update_does_not_work_on_rows_is_not_split():
    assert is_whole(*split(by_scan, X, splittable=()))


def test_a_stack_of_one_is_not_split():
    one = jax.ShapeDtypeStruct((1, 4, 4), jnp.float32)
    assert is_whole(*split(by_scan, X, stack=one))


def test_a_row_that_is_an_output_is_still_returned():
    # The scan reads the row too, through a slice of its own.
    _, (graph, arrays, _) = split(lambda w, x: (by_scan(w, x), w[0:1]), X)
    assert arrays[graph.outvars[1]].rows == (0, 1)


def test_an_equation_without_results_is_kept():
    def function(w, x):
        jax.debug.callback(lambda v: None, x)
        return by_scan(w, x)

    _, (graph, _, paths) = split(function, X)
    assert paths == {"w"}
    assert any("callback" in e.primitive.name for e in graph.equations)


def test_rows_that_nothing_reads_are_arrays_of_the_leaf_too():
    _, (graph, arrays, paths) = split(lambda w, x: w[0] @ x, X)
    assert paths == {"w"}
    assert rows(arrays) == [(0, 1), (1, 2), (2, 3)]
    assert set(arrays) <= set(graph.invars)
    assert {v.aval.shape for v in arrays} == {(1, 4, 4)}


@pytest.mark.parametrize("function", [by_scan, by_number, by_cast_scan])
def test_a_leaf_read_by_rows_is_a_stack_of_layers(function):
    assert stacked(function, X) == {"w"}


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: w[0] @ x + w[1:].sum((0, 1)),
        lambda w, x: jnp.tensordot(w, x, 1),
        lambda w, x: (w[0] @ x, w),
        lambda w, x: x,
    ],
    ids=["some rows at once", "whole", "returned", "unread"],
)
def test_a_leaf_that_is_read_otherwise_is_no_stack(function):
    assert stacked(function, X) == set()
