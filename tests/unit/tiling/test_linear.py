"""Tiled linear layers have the numbers of the plain one, for any shape and cut."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zinf.tiling import LinearTiles, join, linear, linear_parts, split

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
# What sums of up to 64 products lose in float32, in whatever order, for each of them.
SUMS = 64 * 2.0**-24


def normal(shape, dtype=jnp.float32, *, seed=0):
    made = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(made, dtype)


def wide(x):
    return np.asarray(x, np.float64)


def plain(kernel, bias, x):
    out = jnp.matmul(x, kernel)
    return out if bias is None else out + bias.reshape((1,) * (x.ndim - 1) + (-1,))


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
@pytest.mark.parametrize(
    ("rows", "dim", "out", "splits"), [(8, 64, 256, 4), (23, 29, 12, 3)]
)
def test_output_splits_change_no_bit(rows, dim, out, splits, dtype):
    kernel, bias = normal((dim, out), dtype), normal((out,), dtype, seed=1)
    x = normal((rows, dim), dtype, seed=2)
    tiles = LinearTiles.split(kernel, bias, out_splits=splits)
    np.testing.assert_array_equal(
        jax.jit(linear)(tiles, x), jax.jit(plain)(kernel, bias, x)
    )


@pytest.mark.slow
def test_many_tiles_lose_no_more_than_two():
    """Sums over tiles are float32: in bfloat16 they would lose 64 times as much."""
    kernel, x = (abs(normal(s, jnp.bfloat16)) for s in ((512, 64), (4, 512)))
    exact = wide(x) @ wide(kernel)

    def error(made):
        return (abs(wide(made) - exact) / exact).max()

    def naive(x):
        pairs = zip(split(x, 64), split(kernel, 64, axis=0), strict=True)
        total = jnp.zeros((4, 64), jnp.bfloat16)
        for a, b in pairs:
            total = total + a @ b
        return total

    # The last rounding, and those of products, which are smaller by a factor of 64.
    tiles = LinearTiles.split(kernel, in_splits=64)
    assert error(jax.jit(linear)(tiles, x)) <= 1.5 * 2.0**-8
    assert error(jax.jit(naive)(x)) > 4 * 2.0**-8


def test_parts_go_from_layer_to_layer_without_being_joined():
    first, second = normal((10, 22)), normal((22, 6), seed=1)
    x = normal((5, 10), seed=2)
    up = LinearTiles.split(first, out_splits=3)
    down = LinearTiles.split(second, in_splits=3)
    hidden = linear_parts(up, [x])
    chex.assert_shape(hidden, [(5, 8), (5, 7), (5, 7)])
    (made,) = linear_parts(down, hidden)
    np.testing.assert_array_equal(join(hidden), linear(up, x))
    np.testing.assert_array_equal(made, linear(down, linear(up, x)))


def test_tiles_are_joined_to_what_was_split():
    kernel, bias = normal((23, 29)), normal((29,), seed=1)
    tiles = LinearTiles.split(kernel, bias, in_splits=5, out_splits=4)
    assert tiles.in_sizes == (5, 5, 5, 4, 4) and tiles.out_sizes == (8, 7, 7, 7)
    assert len(jax.tree.leaves(tiles)) == 5 * 4 + 4
    chex.assert_trees_all_equal(tiles.join(), (kernel, bias), strict=True)


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


def test_it_runs_on_a_mesh_without_moving_activations():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("fsdp"))
    kernel, bias = normal((16, 24)), normal((24,), seed=1)
    x = jax.device_put(normal((8, 5, 16), seed=2), rows)
    tiles = LinearTiles.split(kernel, bias, in_splits=2, out_splits=3)
    run = jax.jit(linear).lower(tiles, x).compile()
    assert not {"all-gather", "all-to-all"} & set(run.as_text().split("("))
    np.testing.assert_allclose(
        run(tiles, x), plain(kernel, bias, x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda t: linear(t, jnp.ones((2, 9))), r"take 10 features \(5 \+ 5\)"),
        (lambda t: linear_parts(t, [jnp.ones((2, 10))]), r"tiles take \(5, 5\)"),
        (lambda t: LinearTiles.split(t.join()[0], in_splits=11), "into 11 tiles"),
        (lambda t: split(jnp.ones(3), 0), "axis of 3 cannot be cut into 0"),
    ],
)
def test_what_does_not_fit_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run(LinearTiles.split(jnp.ones((10, 4)), in_splits=2))
