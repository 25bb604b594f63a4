"""Tiled linear layers have the numbers of the plain one, for any shape and cut."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.refusals import refusals
from tests.unit.tiling.arrays import normal, wide
from zinf.tiling import (
    LinearTiles,
    MlpTiles,
    join,
    linear,
    linear_parts,
    over_rows,
    split,
)

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
# What sums of up to 64 products lose in float32, in whatever order, for each of them.
SUMS = 64 * 2.0**-24


def plain(kernel, bias, x):
    return jnp.matmul(x, kernel) + bias.reshape((1,) * (x.ndim - 1) + (-1,))


def assert_within(made, exact, parts, *, dtype, roundings):
    """Each rounding is of something no larger than the sum of magnitudes `parts`."""
    unit = UNIT[jnp.dtype(dtype).name]
    bound = (roundings * unit + SUMS) * parts + 1e-30
    assert (abs(wide(made) - exact) <= bound).all()


@settings(max_examples=6, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 7, 23]),
    shape=st.sampled_from([(23, 29), (1, 1), (2, 31), (64, 8), (37, 3)]),
    splits=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    has_bias=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_values_and_gradients_are_within_the_stated_bound(
    rows, shape, splits, has_bias, dtype
):
    in_splits, out_splits = (min(s, n) for s, n in zip(splits, shape, strict=True))
    kernel, x = normal(shape, dtype), normal((rows, shape[0]), dtype, seed=1)
    bias = normal(shape[1:], dtype, seed=2) if has_bias else None
    by = normal((rows, shape[1]), dtype, seed=3)
    tiles = LinearTiles.split(kernel, bias, in_splits=in_splits, out_splits=out_splits)

    # In one program, which is faster to compile than its operations one by one.
    @jax.jit
    def results(tiles, x, by):
        made, pull = jax.vjp(linear, tiles, x)
        by_tiles, by_x = pull(by)
        return made, by_x, *by_tiles.join()

    made, by_x, by_kernel, by_bias = results(tiles, x, by)

    w, v, g = map(wide, (kernel, x, by))
    terms = (0 if bias is None else wide(bias), 0 if bias is None else abs(wide(bias)))
    exact, parts = v @ w + terms[0], abs(v) @ abs(w) + terms[1]
    chex.assert_type([made, by_x, by_kernel], dtype)
    # Of tiles, of their sum, and with the bias.
    assert_within(made, exact, parts, dtype=dtype, roundings=3)
    assert_within(by_x, g @ w.T, abs(g) @ abs(w).T, dtype=dtype, roundings=2)
    parts = abs(v).T @ abs(g)
    assert_within(by_kernel, v.T @ g, parts, dtype=dtype, roundings=1)
    if has_bias:
        # A sum over rows, for which XLA may keep the dtype.
        parts = abs(g).sum(axis=0)
        assert_within(by_bias, g.sum(axis=0), parts, dtype=dtype, roundings=rows)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_output_splits_change_no_bit(dtype):
    kernel, bias = normal((23, 29), dtype), normal((29,), dtype, seed=1)
    x = normal((12, 23), dtype, seed=2)
    tiles = LinearTiles.split(kernel, bias, out_splits=3)
    # A sum may depend on the number of columns: on some processors XLA's does.
    ends = np.cumsum(tiles.out_sizes)[:-1]
    columns = zip(np.split(kernel, ends, axis=1), np.split(bias, ends), strict=True)
    expected = [jax.jit(plain)(w, b, x) for w, b in columns]
    np.testing.assert_array_equal(
        jax.jit(linear)(tiles, x), np.concatenate(expected, axis=1)
    )


def test_many_tiles_lose_no_more_than_two():
    """Sums over tiles are float32: in bfloat16 they would lose 64 times as much."""
    kernel, x = (abs(normal(s, jnp.bfloat16)) for s in ((512, 64), (4, 512)))
    exact = wide(x) @ wide(kernel)
    tiles = LinearTiles.split(kernel, in_splits=64)
    error = (abs(wide(jax.jit(linear)(tiles, x)) - exact) / exact).max()
    # The last rounding, and those of products, which are smaller by a factor of 64.
    assert error <= 1.5 * 2.0**-8


def test_tiles_are_joined_to_what_was_split_and_parts_go_on_unjoined():
    kernel, bias = normal((23, 29)), normal((29,), seed=1)
    tiles = LinearTiles.split(kernel, bias, in_splits=5, out_splits=4)
    assert tiles.in_sizes == (5, 5, 5, 4, 4) and tiles.out_sizes == (8, 7, 7, 7)
    assert len(jax.tree.leaves(tiles)) == 5 * 4 + 4
    chex.assert_trees_all_equal(tiles.join(), (kernel, bias), strict=True)
    # The output of a layer goes to the next one in parts.
    down = LinearTiles.split(normal((29, 6), seed=2), in_splits=4)
    x = normal((5, 23), seed=3)
    hidden = linear_parts(tiles, split(x, 5))
    chex.assert_shape(hidden, [(5, 8), (5, 7), (5, 7), (5, 7)])
    (made,) = linear_parts(down, hidden)
    np.testing.assert_array_equal(join(hidden), linear(tiles, x))
    np.testing.assert_array_equal(made, linear(down, linear(tiles, x)))


def test_init_gives_the_numbers_of_the_plain_layer():
    key = jax.random.key(3)
    tiles = LinearTiles.init(key, (12, 20), in_splits=2, out_splits=5)
    kernel, bias = tiles.join()
    init = jax.nn.initializers.lecun_normal()
    np.testing.assert_array_equal(kernel, init(key, (12, 20), jnp.float32))
    np.testing.assert_array_equal(bias, np.zeros(20))


def test_it_works_under_vmap_jit_and_forward_differentiation():
    kernel, bias = normal((6, 10)), normal((10,), seed=1)
    x, dx = normal((3, 4, 6), seed=2), normal((3, 4, 6), seed=3)
    tiles = LinearTiles.split(kernel, bias, in_splits=2, out_splits=3)
    mapped = jax.jit(jax.vmap(linear, (None, 0)))(tiles, x)
    np.testing.assert_allclose(mapped, plain(kernel, bias, x), rtol=1e-6, atol=1e-6)
    _, made = jax.jvp(lambda x: linear(tiles, x), (x,), (dx,))
    np.testing.assert_allclose(made, dx @ kernel, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused(golden):
    tiles = LinearTiles.split(jnp.ones((10, 4)), in_splits=2)
    up, down, x = jnp.ones((6, 8)), jnp.ones((8, 6)), jnp.ones((5, 6))

    def rows(function=jnp.matmul, params=up, tile_rows=2):
        return lambda: over_rows(function, params, x, tile_rows=tile_rows)

    cases = {
        "an input that is too short": lambda: linear(tiles, jnp.ones((2, 9))),
        "one part for two tiles": lambda: linear_parts(tiles, [jnp.ones((2, 10))]),
        "more tiles than inputs": lambda: LinearTiles.split(up, in_splits=7),
        "no tile": lambda: split(jnp.ones(3), 0),
        "more tiles than hidden units": lambda: MlpTiles.split(up, down, splits=9),
        "no row at a time": rows(tile_rows=0),
        "integers that are not trained": rows(params=jnp.ones((6, 8), int)),
        "fewer rows than were given": rows(lambda p, x: x[:2]),
        "a number for all rows": rows(lambda p, x: jnp.sum(x)),
    }
    golden.check("refusals.txt", refusals(cases))
