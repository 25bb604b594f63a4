"""Rows in sequence: the numbers of all at once, and the memory of one tile."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zinf.tiling import over_rows


def normal(shape, dtype=jnp.float32, *, seed=0):
    made = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(made, dtype)


def block(params, x):
    """Row by row, with a row that is wider within."""
    return jnp.tanh(x @ params["up"]) @ params["down"]


def make(dim=6, hidden=20, dtype=jnp.float32):
    up, down = normal((dim, hidden), dtype), normal((hidden, 5), dtype, seed=1)
    return {"up": up / dim**0.5, "down": down / hidden**0.5}


def assert_equal(made, expected):
    """Sums of up to 64 float32 terms of unit size, in another order."""
    bound = 64 * 2.0**-24
    chex.assert_trees_all_close(made, expected, rtol=bound, atol=bound, strict=True)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    batch=st.sampled_from([(), (1,), (3,)]),
    rows=st.sampled_from([0, 1, 5, 23]),
    tile=st.sampled_from([1, 4, 7, 23, 100]),
)
def test_values_and_gradients_are_those_of_all_rows_at_once(batch, rows, tile):
    params, x = make(), normal((*batch, rows, 6), seed=2)
    by = normal((*batch, rows, 5), seed=3)

    def results(run):
        made, pull = jax.vjp(run, params, x)
        return made, pull(by)

    tiled = partial(over_rows, block, tile_rows=tile)
    made, expected = (jax.jit(results, static_argnums=0)(f) for f in (tiled, block))
    assert_equal(made, expected)


@pytest.mark.slow
def test_gradients_of_parameters_are_summed_in_float32():
    """200 tiles of bfloat16, added in bfloat16, would lose every second bit."""
    params = jax.tree.map(abs, make(dtype=jnp.bfloat16))
    x = abs(normal((200, 6), jnp.bfloat16, seed=2))

    def total(run, params):
        return jnp.sum(run(block, params, x).astype(jnp.float32))

    grads = jax.grad(partial(total, partial(over_rows, tile_rows=1)))(params)
    exact = jax.grad(lambda p: jnp.sum(block(p, x.astype(jnp.float32))))(
        jax.tree.map(lambda a: a.astype(jnp.float32), params)
    )
    chex.assert_type(jax.tree.leaves(grads), jnp.bfloat16)
    # A row's own roundings average out, and there is one of the sum.
    chex.assert_trees_all_close(grads, exact, rtol=4 * 2.0**-8)


def test_the_widest_part_is_there_for_one_tile_only():
    """Temporary bytes of value and gradients, as XLA plans them."""
    rows, dim, hidden, tile = 4096, 32, 4096, 128
    params = {"up": (dim, hidden), "down": (hidden, dim)}
    arrays = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        (params, (rows, dim)),
        is_leaf=lambda s: isinstance(s, tuple) and isinstance(s[0], int),
    )

    def temporary(run):
        def total(params, x):
            return jnp.sum(jnp.square(run(block, params, x)))

        lowered = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*arrays)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    plain = temporary(lambda f, p, x: f(p, x))
    tiled = temporary(partial(over_rows, tile_rows=tile))
    assert plain >= 4 * rows * hidden
    # Forward and backward a few widths of a tile; sums of gradients; three narrow ones.
    assert tiled <= 4 * (5 * tile * hidden + 3 * dim * hidden + 4 * rows * dim)
    assert tiled < plain / 8


def test_rows_of_any_axis_can_be_tiled():
    params, x = make(), normal((5, 3, 6), seed=2)
    made = over_rows(block, params, x, tile_rows=2, axis=0)
    assert_equal(made, block(params, x))


def test_it_works_under_vmap():
    params, x = make(), normal((4, 7, 6), seed=2)
    made = jax.vmap(lambda x: over_rows(block, params, x, tile_rows=3))(x)
    assert_equal(made, block(params, x))


def test_a_batch_on_several_devices_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = make()
    x = jax.device_put(normal((8, 7, 6), seed=2), NamedSharding(mesh, P("fsdp")))

    def total(params, x):
        return jnp.sum(jnp.square(over_rows(block, params, x, tile_rows=3)))

    run = jax.jit(jax.value_and_grad(total, (0, 1))).lower(params, x).compile()
    assert "all-gather" not in run.as_text() and "all-to-all" not in run.as_text()
    plain = jax.value_and_grad(lambda p, x: jnp.sum(jnp.square(block(p, x))), (0, 1))
    assert_equal(run(params, x), jax.jit(plain)(params, x))


@pytest.mark.parametrize("checked", [True, False])
def test_parameters_that_all_devices_have_get_the_sum_of_gradients(checked):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    params, x = make(), normal((40, 6), seed=2)
    tiled = jax.shard_map(
        partial(over_rows, block, tile_rows=2),
        mesh=mesh,
        in_specs=(P(), P("fsdp")),
        out_specs=P("fsdp"),
        check_vma=checked,
    )

    def total(run, params, x):
        return jnp.sum(jnp.square(run(params, x)))

    made, expected = (
        jax.jit(jax.grad(partial(total, run), (0, 1)))(params, x)
        for run in (tiled, block)
    )
    assert_equal(made, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_rows": 0}, "tile_rows is 0"),
        ({"params": {"up": jnp.ones(3, int)}}, "array of int32 in params"),
        ({"function": lambda p, x: x[:2]}, "not a row for each row"),
        ({"function": lambda p, x: jnp.sum(x)}, "not a row for each row"),
    ],
)
def test_what_has_no_rows_is_refused(change, message):
    given_ = {"function": block, "params": make(), "x": normal((5, 6)), "tile_rows": 2}
    with pytest.raises(ValueError, match=message):
        over_rows(**given_ | change)
