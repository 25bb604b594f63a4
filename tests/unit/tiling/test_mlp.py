"""MLPs in tiles of hidden units and of rows have the numbers of the plain one."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tiling.arrays import normal
from zinf.tiling import MlpTiles, mlp


def weights(dim, hidden, *, gated, biased):
    made = {
        "up": normal((dim, hidden), seed=1, scale=dim**-0.5),
        "down": normal((hidden, dim), seed=2, scale=hidden**-0.5),
    }
    if gated:
        made["gate"] = normal((dim, hidden), seed=3, scale=dim**-0.5)
    if biased:
        made |= {"up_bias": normal((hidden,), seed=4), "bias": normal((dim,), seed=5)}
        made |= {"gate_bias": normal((hidden,), seed=6)} if gated else {}
    return made


def plain(p, x, activation=jax.nn.gelu):
    def line(name):
        return p[name].reshape((1,) * (x.ndim - 1) + (-1,)) if name in p else 0

    up = x @ p["up"] + line("up_bias")
    if "gate" in p:
        hidden = activation(x @ p["gate"] + line("gate_bias")) * up
    else:
        hidden = activation(up)
    return hidden @ p["down"] + line("bias")


def tiled(splits, tile_rows):
    return lambda p, x: mlp(MlpTiles.split(**p, splits=splits), x, tile_rows=tile_rows)


def total(run, weights, x):
    return jnp.sum(jnp.square(run(weights, x).astype(jnp.float32)))


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    shape=st.sampled_from([(7, 23), (29, 11), (1, 5)]),
    rows=st.sampled_from([0, 1, 13]),
    splits=st.sampled_from([1, 2, 5]),
    tile_rows=st.sampled_from([None, 1, 4, 99]),
    kind=st.tuples(st.booleans(), st.booleans()),
)
def test_values_and_gradients_are_those_of_the_plain_form(
    shape, rows, splits, tile_rows, kind
):
    dim, hidden = shape
    p = weights(dim, hidden, gated=kind[0], biased=kind[1])
    x = normal((2, rows, dim), seed=7)
    made, expected = (
        jax.jit(jax.value_and_grad(partial(total, run), (0, 1)))(p, x)
        for run in (tiled(splits, tile_rows), plain)
    )
    # Sums of under 30 terms, and of their squares' gradients over up to 26 rows.
    chex.assert_trees_all_close(made, expected, rtol=3e-5, atol=1e-4)


def test_tiles_are_joined_to_what_was_split_and_init_to_plain_numbers():
    p = weights(7, 23, gated=True, biased=True)
    joined = MlpTiles.split(**p, splits=4).join()
    chex.assert_trees_all_equal(joined, p, strict=True)
    assert MlpTiles.split(p["up"], p["down"], splits=4).join()["gate"] is None

    key = jax.random.key(0)
    made = MlpTiles.init(key, 6, 24, splits=3, is_gated=True).join()
    init = jax.nn.initializers.lecun_normal()
    shapes = {"up": (6, 24), "down": (24, 6), "gate": (6, 24)}
    keys = jax.random.split(key, 3)
    for k, (name, shape) in zip(keys, shapes.items(), strict=True):
        np.testing.assert_array_equal(made[name], init(k, shape, jnp.float32))
    chex.assert_shape([made["gate_bias"], made["bias"]], [(24,), (6,)])


@pytest.mark.parametrize("tile_rows", [None, 2])
def test_an_mlp_of_as_many_tiles_as_units_can_be_mapped(tile_rows):
    p = weights(6, 8, gated=False, biased=False)
    x = normal((3, 5, 6), seed=7)
    run = partial(mlp, MlpTiles.split(**p, splits=8), tile_rows=tile_rows)
    np.testing.assert_allclose(jax.vmap(run)(x), plain(p, x), rtol=1e-5, atol=1e-5)
