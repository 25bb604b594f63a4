"""Modules of tiles have the numbers of Flax's own layers, and a leaf for each tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from zinf.core.segment import named_leaves
from zinf.tiling import LinearTiles
from zinf.tiling.linen import TiledDense
from zinf.tiling.nnx import TiledLinear, TiledMlp

X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 6)), jnp.float32)
# Sums of up to 24 products of unit size.
SUMS = 24 * 2.0**-24


def normal(key, shape, dtype):
    """A bias that is not zero shows which key made it."""
    return jax.random.normal(key, shape, dtype)


def test_an_nnx_layer_has_the_numbers_of_nnx_linear():
    splits = (2, 3)
    options = {"bias_init": normal, "rngs": nnx.Rngs(7)}
    tiled = TiledLinear(6, 8, in_splits=splits[0], out_splits=splits[1], **options)
    plain = nnx.Linear(6, 8, bias_init=normal, rngs=nnx.Rngs(7))
    np.testing.assert_allclose(tiled(X), plain(X), rtol=SUMS, atol=SUMS)
    names = named_leaves(nnx.to_pure_dict(nnx.state(tiled)))
    assert len(names) == splits[0] * splits[1] + splits[1]
    assert "tiles/kernel/0/0" in names
    grads = nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(tiled)
    expected = nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(plain)
    kernel = [grads["tiles"]["kernel"][i] for i in range(splits[0])]
    made = jnp.block([[row[j][...] for j in range(splits[1])] for row in kernel])
    np.testing.assert_allclose(made, expected["kernel"][...], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("is_gated", "tile_rows"), [(False, None), (True, 3)])
def test_an_nnx_mlp_has_the_numbers_of_layers_made_in_its_order(is_gated, tile_rows):
    options = {"is_gated": is_gated, "tile_rows": tile_rows, "bias_init": normal}
    tiled = TiledMlp(6, 24, splits=5, **options, rngs=nnx.Rngs(7))
    rngs = nnx.Rngs(7)
    up = nnx.Linear(6, 24, bias_init=normal, rngs=rngs)
    down = nnx.Linear(24, 6, bias_init=normal, rngs=rngs)
    hidden = jax.nn.gelu(up(X))
    if is_gated:
        hidden = jax.nn.gelu(nnx.Linear(6, 24, bias_init=normal, rngs=rngs)(X)) * up(X)
    np.testing.assert_allclose(tiled(X), down(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_bias", [False, True])
def test_a_linen_layer_has_the_numbers_of_dense(use_bias):
    options = {"use_bias": use_bias, "bias_init": normal, "name": "layer"}

    class Model(nn.Module):
        layer: type

        @nn.compact
        def __call__(self, x):
            splits = (
                {"in_splits": 2, "out_splits": 3} if self.layer is TiledDense else {}
            )
            return self.layer(8, **options, **splits)(x)

    tiled, plain = Model(TiledDense), Model(nn.Dense)
    made, expected = (m.init(jax.random.key(3), X) for m in (tiled, plain))
    leaves = made["params"]["layer"]
    assert len(jax.tree.leaves(leaves)) == 6 + 3 * use_bias
    kernel, bias = LinearTiles(leaves["kernel"], leaves.get("bias")).join()
    np.testing.assert_array_equal(kernel, expected["params"]["layer"]["kernel"])
    if use_bias:
        np.testing.assert_array_equal(bias, expected["params"]["layer"]["bias"])
    ours, theirs = tiled.apply(made, X), plain.apply(expected, X)
    np.testing.assert_allclose(ours, theirs, rtol=SUMS, atol=SUMS)
