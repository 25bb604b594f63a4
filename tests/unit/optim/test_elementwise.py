"""Element-wise programs are told from others, and run on blocks as on the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.jaxpr import flatten, trace
from zinf.optim.elementwise import at_shape, is_elementwise

SHAPE = (6, 4)
ARRAY = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def graph(function):
    return flatten(trace(function, ARRAY, ARRAY, SCALAR)[0])


def decide(function):
    return is_elementwise(graph(function), shape=SHAPE, num_arrays=2)


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
        for part, wanted in zip(
            block(x[k : k + 2], y[k : k + 2], scalar), whole, strict=True
        ):
            wanted = wanted[k : k + 2] if np.ndim(wanted) else wanted
            np.testing.assert_array_equal(part, wanted)


@pytest.mark.parametrize("name", OTHER)
def test_programs_that_move_or_join_entries_are_not_elementwise(name):
    assert not decide(OTHER[name])


def test_arrays_of_another_shape_are_not_elementwise_input():
    program = flatten(trace(lambda x, v: x * v, ARRAY, SCALAR)[0])
    assert not is_elementwise(program, shape=SHAPE, num_arrays=2)
