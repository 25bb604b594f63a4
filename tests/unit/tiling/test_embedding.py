"""A look-up in tiles is a look-up in the table, to the bit."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow_except
from zinf.tiling import embed, split


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("num_tiles", "shape", "dtype"),
    slow_except(
        [(1, (23,), jnp.float32), (4, (0,), jnp.float32), (4, (4, 7), jnp.bfloat16)],
        product([1, 4], [(23,), (0,), (1,), (4, 7)], [jnp.float32, jnp.bfloat16]),
    ),
)
def test_vectors_and_gradients_are_those_of_one_table(shape, num_tiles, dtype):
    random = np.random.default_rng(0)
    table = jnp.asarray(random.standard_normal((29, 5)), dtype)
    tokens = jnp.asarray(random.integers(0, 29, shape))
    by = jnp.asarray(random.standard_normal((*shape, 5)), dtype)
    tiles = split(table, num_tiles, axis=0)
    made, pull = jax.vjp(lambda tiles: embed(tiles, tokens), tiles)
    expected, pull_plain = jax.vjp(lambda table: table[tokens], table)
    np.testing.assert_array_equal(made, expected)
    np.testing.assert_array_equal(jnp.concatenate(pull(by)[0]), *pull_plain(by))


def test_a_token_that_no_tile_has_is_not_passed_over():
    tiles = split(jnp.ones((6, 2)), 3, axis=0)
    made = embed(tiles, jnp.array([0, 5, 6, -1]))
    np.testing.assert_array_equal(np.isnan(made[:, 0]), [False, False, True, True])
