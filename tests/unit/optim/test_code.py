"""The code of updates: which is element-wise, and conds taken apart by leaf."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.jaxpr import flatten, trace
from zinf.core.optim.conditional import split_conditionals
from zinf.core.optim.coupling import dependencies
from zinf.core.optim.elementwise import at_shape, is_elementwise

SHAPE = (6, 4)
ARRAY = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def graph(function, *arguments):
    return flatten(trace(function, *(arguments or (ARRAY, ARRAY, SCALAR)))[0])


ELEMENTWISE = {
    "adam": lambda x, y, s: s * x / (jnp.sqrt(y) + 1e-8),
    "select": lambda x, y, s: jnp.where(s > 0, jnp.clip(x, -1, 1), jnp.zeros_like(y)),
    "cast": lambda x, y, s: x.astype(jnp.bfloat16),
    "constant": lambda x, y, s: (jnp.full_like(x, s), 0.5),
    "input": lambda x, y, s: y,
}
OTHER = {
    "reduction": lambda x, y, s: x / jnp.max(y),
    "row_mean": lambda x, y, s: x - y.mean(0, keepdims=True),
    "matmul": lambda x, y, s: x @ y.T @ x,
    "transpose": lambda x, y, s: (x.T * 2).T,
    "reversed": lambda x, y, s: x[::-1],
    "array_constant": lambda x, y, s: x + np.arange(24, dtype="f").reshape(SHAPE),
    "positions": lambda x, y, s: x + jax.lax.iota(jnp.float32, 6)[:, None],
    "cumulative": lambda x, y, s: jnp.cumsum(x, axis=0),
    "random": lambda x, y, s: x + jax.random.normal(jax.random.key(0), SHAPE),
    "other_shape": lambda x, y, s: jnp.zeros((6,)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_programs_run_on_blocks_as_on_the_whole(name):
    program = graph(ELEMENTWISE[name])
    assert is_elementwise(program, shape=SHAPE, num_arrays=2)
    x, y = np.random.default_rng(0).uniform(0.1, 2, (2, *SHAPE)).astype("f")
    scalar = np.float32(0.3)
    whole = program(x, y, scalar)
    block = at_shape(program, shape=SHAPE, block=(2, 4))
    for k in range(0, 6, 2):
        parts = block(x[k : k + 2], y[k : k + 2], scalar)
        for part, wanted in zip(parts, whole, strict=True):
            wanted = wanted[k : k + 2] if np.ndim(wanted) else wanted
            np.testing.assert_array_equal(part, wanted)


@pytest.mark.parametrize("name", OTHER)
def test_programs_that_move_or_join_entries_are_not_elementwise(name):
    assert not is_elementwise(graph(OTHER[name]), shape=SHAPE, num_arrays=2)


def test_arrays_of_another_shape_are_not_elementwise_input():
    program = graph(lambda x, v: x * v, ARRAY, SCALAR)
    assert not is_elementwise(program, shape=SHAPE, num_arrays=2)


COUNT, LEAF = jnp.int32(0), jax.ShapeDtypeStruct((4,), jnp.float32)
TABLE = np.arange(4, dtype=np.float32)


def two_leaves(count, x, y):
    def double(x, y):
        triple = lambda a, b: (a, b * 3)  # noqa: E731
        return jax.lax.cond(count > 5, triple, lambda a, b: (a, b), x, y)

    return jax.lax.cond(count > 2, double, lambda x, y: (x + TABLE, 0 * y), x, y)


def coupled(count, x, y):
    return jax.lax.cond(x[0] > 0, lambda a, b: (a, b), lambda a, b: (b, a), x, y)


def split(function, *leaves):
    """The program, and the leaves on which each result depends, as bits."""
    whole = graph(function, COUNT, *leaves)
    leaf_bits = {v: 1 << i for i, v in enumerate(whole.invars[1:])}
    program = split_conditionals(whole, leaf_bits)
    found = dependencies(program, leaf_bits)
    return program, [found.get(v, 0) for v in program.outvars]


def test_nested_conds_are_taken_apart_by_leaf():
    program, depends_on = split(two_leaves, LEAF, LEAF)
    assert depends_on == [0b01, 0b10]
    x, y = np.random.default_rng(0).normal(size=(2, 4)).astype("f")
    for count in (1, 4, 8):
        found = tuple(program(np.int32(count), x, y))
        chex.assert_trees_all_equal(found, two_leaves(count, x, y), strict=True)


def test_a_predicate_made_from_a_leaf_still_couples():
    assert split(coupled, LEAF, LEAF)[1] == [0b11, 0b11]


def test_a_cond_of_one_leaf_keeps_its_branches_unevaluated():
    program, _ = split(lambda n, x: jax.lax.cond(n > 2, jnp.sin, jnp.cos, x), LEAF)
    assert "cond" in [e.primitive.name for e in program.equations]
