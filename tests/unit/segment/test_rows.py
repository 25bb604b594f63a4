"""Leaves that are read by rows only become one array a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.jaxpr import flatten, trace
from zinf.core.jaxpr.compat import open_jaxpr
from zinf.core.program import ArrayId, Role
from zinf.core.segment.rows import read_by_row, split_rows

STACK = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((4,), jnp.float32)


def split(function, splittable=("w",), stack=STACK):
    """The leaf, its paths if it is read by row, and what `split_rows` makes of it."""
    closed, _ = trace(function, stack, X)
    leaf = open_jaxpr(closed)[0].invars[0]
    graph = flatten(closed, stacked=(leaf,))
    by_row = read_by_row(graph, {leaf: "w"})
    return leaf, by_row, split_rows(graph, {leaf: "w"}, splittable)


def rows(arrays):
    return sorted(a.rows for a in arrays.values() if a.rows)


def by_scan(w, x):
    return jax.lax.scan(lambda c, row: (jnp.tanh(row @ c), None), x, w)[0]


def by_negative_number(w, x):
    for i in range(-3, 0):
        x = jnp.tanh(w[i] @ x)
    return x


def by_cast_scan(w, x):
    half = w.astype(jnp.bfloat16)
    return jax.lax.scan(lambda c, row: (row.astype("f4") @ c, None), x, half)[0]


def row_twice(w, x):
    """One row is read twice, and one never."""
    return w[1] @ (w[1] @ x) + w[0] @ x


BY_ROW = [by_scan, by_negative_number, by_cast_scan, row_twice]


@pytest.mark.parametrize("function", BY_ROW, ids=lambda f: f.__name__)
def test_a_leaf_read_by_rows_is_split_and_the_program_stays_the_same(function):
    leaf, by_row, (graph, arrays, paths) = split(function)
    assert paths == by_row == {"w"}
    assert rows(arrays) == [(0, 1), (1, 2), (2, 3)]
    assert {v.aval.shape for v in arrays} == {(1, 4, 4)}
    assert leaf not in graph.invars and set(arrays) <= set(graph.invars)
    assert len(graph.invars) == 4
    assert "slice" not in [e.primitive.name for e in graph.equations]
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)
    x = jnp.ones(4)
    arguments = [w[slice(*arrays[v].rows)] if v in arrays else x for v in graph.invars]
    (found,) = graph(*arguments)
    np.testing.assert_allclose(found, function(w, x), rtol=1e-5, atol=1e-6)


OTHERWISE = {
    "sum": lambda w, x: by_scan(w, x) + w.sum(),
    "output": lambda w, x: (by_scan(w, x), w),
    "two rows": lambda w, x: w[0:2].sum() + w[2].sum(),
    "every second column": lambda w, x: w[1:2, ::2].sum() + w[0].sum(),
    "part of a row": lambda w, x: w[0, :, 1].sum() + w[1].sum(),
    "unsliced": lambda w, x: jnp.tensordot(w, x, 1),
    "an update that is not by row": by_scan,
    "a stack of one": by_scan,
    "unread": lambda w, x: x,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_leaf_that_is_also_read_otherwise_is_not_split(name):
    splittable = () if "update" in name else ("w",)
    stack = jax.ShapeDtypeStruct((1, 4, 4), jnp.float32) if "one" in name else STACK
    leaf, by_row, (graph, arrays, paths) = split(OTHERWISE[name], splittable, stack)
    assert not paths and leaf in graph.invars
    assert arrays == {leaf: ArrayId(Role.PARAM, "w")}
    assert bool(by_row) == ("update" in name)


def test_a_row_that_is_an_output_is_still_returned():
    # The scan reads the row too, through a slice of its own.
    *_, (graph, arrays, _) = split(lambda w, x: (by_scan(w, x), w[0:1]))
    assert arrays[graph.outvars[1]].rows == (0, 1)


def test_an_equation_without_results_is_kept():
    def function(w, x):
        jax.debug.callback(lambda v: None, x)
        return by_scan(w, x)

    *_, (graph, _, paths) = split(function)
    assert paths == {"w"}
    assert any("callback" in e.primitive.name for e in graph.equations)
