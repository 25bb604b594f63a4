"""A cond over several leaves is taken apart without changing a result."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from zinf.jaxpr import flatten, trace
from zinf.optim.conditional import split_conditionals
from zinf.optim.coupling import dependencies

LEAF = jax.ShapeDtypeStruct((4,), jnp.float32)
TABLE = np.arange(4, dtype=np.float32)


def two_leaves(count, x, y):
    def double(x, y):
        return jax.lax.cond(
            count > 5, lambda a, b: (a, b * 3), lambda a, b: (a, b), x, y
        )

    return jax.lax.cond(count > 2, double, lambda x, y: (x + TABLE, 0 * y), x, y)


def split(function, *arguments):
    graph = flatten(trace(function, *arguments)[0])
    leaf_bits = {v: 1 << i for i, v in enumerate(graph.invars[1:])}
    return split_conditionals(graph, leaf_bits), leaf_bits


def test_nested_conds_are_taken_apart_by_leaf():
    graph, leaf_bits = split(two_leaves, jnp.int32(0), LEAF, LEAF)
    found = dependencies(graph, leaf_bits)
    assert [found.get(v, 0) for v in graph.outvars] == [0b01, 0b10]
    x, y = np.random.default_rng(0).normal(size=(2, 4)).astype("f")
    for count in (1, 4, 8):
        wanted = two_leaves(count, x, y)
        found = tuple(graph(np.int32(count), x, y))
        chex.assert_trees_all_equal(found, wanted, strict=True)


def test_a_cond_of_one_leaf_keeps_its_branches_unevaluated():
    def one_leaf(count, x):
        return jax.lax.cond(count > 2, jnp.sin, jnp.cos, x)

    graph, _ = split(one_leaf, jnp.int32(0), LEAF)
    assert "cond" in [e.primitive.name for e in graph.equations]


def test_a_predicate_made_from_a_leaf_still_couples():
    def coupled(count, x, y):
        return jax.lax.cond(x[0] > 0, lambda a, b: (a, b), lambda a, b: (b, a), x, y)

    graph, leaf_bits = split(coupled, jnp.int32(0), LEAF, LEAF)
    found = dependencies(graph, leaf_bits)
    assert [found[v] for v in graph.outvars] == [0b11, 0b11]
