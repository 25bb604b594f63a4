"""Rows in sequence: the numbers of all at once, and the memory of one tile."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.unit.tiling.arrays import normal
from zinf.tiling import MlpTiles, mlp, over_rows


def block(params, x):
    """Row by row, with a row that is wider within."""
    return jnp.tanh(x @ params["up"]) @ params["down"]


THREE_ROWS = partial(over_rows, block, tile_rows=3)


def make(dim=6, hidden=20, dtype=jnp.float32):
    up, down = normal((dim, hidden), dtype), normal((hidden, dim), dtype, seed=1)
    return {"up": up / dim**0.5, "down": down / hidden**0.5}


def assert_equal(made, expected):
    """Sums of up to 64 float32 terms of unit size, in another order."""
    bound = 64 * 2.0**-24
    chex.assert_trees_all_close(made, expected, rtol=bound, atol=bound, strict=True)


def of_squares(run, params, x):
    return jnp.sum(jnp.square(run(params, x)))


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    batch=st.sampled_from([(), (1,), (3,)]),
    rows=st.sampled_from([0, 1, 5, 23]),
    tile=st.sampled_from([1, 4, 7, 23, 100]),
    is_first=st.booleans(),
)
def test_values_and_gradients_are_those_of_all_rows_at_once(
    batch, rows, tile, is_first
):
    shape = (rows, *batch, 6) if is_first else (*batch, rows, 6)
    params, x, by = make(), normal(shape, seed=2), normal(shape, seed=3)

    def results(run):
        made, pull = jax.vjp(run, params, x)
        return made, pull(by)

    tiled = partial(over_rows, block, tile_rows=tile, axis=0 if is_first else -2)
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


ROWS, DIM, HIDDEN = 2048, 32, 4096


def mlp_in_tiles(p, x):
    return mlp(MlpTiles.split(**p, splits=4), x, tile_rows=256)


def temporary_bytes(run):
    """Of value and gradients, as XLA plans them."""
    shapes = {"up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
    arrays = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
    both = jax.jit(jax.value_and_grad(partial(of_squares, run), (0, 1)))
    return both.lower(arrays, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("run", "share", "sums", "inputs"),
    [
        (partial(over_rows, block, tile_rows=128), ROWS / 128, 1.5, 4),
        (mlp_in_tiles, 4 * ROWS / 256, 2, 6),
    ],
    ids=["rows", "an MLP in tiles of both"],
)
def test_the_widest_part_is_there_for_one_tile_only(run, share, sums, inputs):
    activations, params, narrow = (
        4 * n for n in (ROWS * HIDDEN, 2 * DIM * HIDDEN, ROWS * DIM)
    )
    assert temporary_bytes(block) >= activations
    # Forward and backward a few widths of a tile; sums of gradients; narrow arrays.
    bound = 5 * activations / share + sums * params + inputs * narrow
    assert temporary_bytes(run) <= bound < activations / 2


def test_a_batch_on_several_devices_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = make()
    x = jax.device_put(normal((8, 7, 6), seed=2), NamedSharding(mesh, P("fsdp")))
    tiled, plain = (
        jax.jit(jax.value_and_grad(partial(of_squares, run), (0, 1)))
        for run in (jax.vmap(THREE_ROWS, (None, 0)), block)
    )
    run = tiled.lower(params, x).compile()
    assert "all-gather" not in run.as_text() and "all-to-all" not in run.as_text()
    assert_equal(run(params, x), plain(params, x))


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
    made, expected = (
        jax.jit(jax.grad(partial(of_squares, run), (0, 1)))(params, x)
        for run in (tiled, block)
    )
    assert_equal(made, expected)
