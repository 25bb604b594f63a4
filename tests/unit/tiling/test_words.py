"""Tables in tiles of words: look-ups and losses are those of the whole table."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from tests.unit.tiling.arrays import normal
from zinf.tiling import cross_entropy, cross_entropy_over, embed, split

# Sums of up to 128 terms and exponentials, in float32.
SUMS = 1000 * 2.0**-24
PIECES = {"chunk_tokens": 8, "chunk_vocab": 16}

# Look-ups.


@pytest.mark.parametrize(
    ("num_tiles", "shape", "dtype"),
    [(1, (23,), jnp.float32), (4, (0,), jnp.float32), (4, (4, 7), jnp.bfloat16)],
)
def test_vectors_and_gradients_are_those_of_one_table(shape, num_tiles, dtype):
    table, by = normal((29, 5), dtype), normal((*shape, 5), dtype, seed=1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 29, shape))
    tiles = split(table, num_tiles, axis=0)
    made, pull = jax.vjp(lambda tiles: embed(tiles, tokens), tiles)
    expected, pull_plain = jax.vjp(lambda table: table[tokens], table)
    np.testing.assert_array_equal(made, expected)
    np.testing.assert_array_equal(jnp.concatenate(pull(by)[0]), *pull_plain(by))


def test_a_token_or_label_that_no_tile_has_is_not_passed_over():
    tiles = split(jnp.ones((6, 2)), 3, axis=0)
    made = embed(tiles, jnp.array([0, 5, 6, -1]))
    np.testing.assert_array_equal(np.isnan(made[:, 0]), [False, False, True, True])
    x, weight, labels, _ = make((5,), 7, 12, ignored=0)
    tiles = split(weight, 3)
    assert np.isfinite(cross_entropy(tiles, x, labels.at[2].set(11)).total)
    assert np.isnan(cross_entropy(tiles, x, labels.at[2].set(12)).total)
    assert cross_entropy(tiles, x, labels * 0 - 1).mean == 0


# Losses.


def make(tokens, dim, vocab, *, vocab_axis=1, ignored=0.3):
    random = np.random.default_rng(0)
    x = random.standard_normal((*tokens, dim))
    weight = random.standard_normal((dim, vocab)) / dim**0.5
    labels = random.integers(0, vocab, tokens, dtype=np.int32)
    labels = np.where(random.random(tokens) < ignored, -100, labels)
    weights = random.uniform(0.5, 2, tokens)
    weight = weight if vocab_axis else weight.T
    arrays = (jnp.asarray(a, jnp.float32) for a in (x, weight, weights))
    x, weight, weights = arrays
    return x, weight, jnp.asarray(labels, jnp.int32), weights


def plain(x, weight, labels, weights, *, vocab_axis=1, z_loss=0.0):
    """The mean in float32, with all logits."""
    weight = weight if vocab_axis else weight.T
    logits = x.astype(jnp.float32) @ weight.astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    index = jnp.clip(labels, 0)[..., None]
    picked = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    weights = jnp.where(labels < 0, 0, weights)
    losses = lse - picked + z_loss * lse**2
    return jnp.sum(weights * losses) / jnp.maximum(jnp.sum(weights), 1e-9)


def assert_same(run, plain, x, weight):
    """Losses and gradients."""
    made, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(x, weight) for f in (run, plain)
    )
    chex.assert_trees_all_close(made, expected, rtol=SUMS, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    tokens=st.sampled_from([(23,), (0,), (1,), (3, 7)]),
    vocab=st.sampled_from([29, 5, 64]),
    num_tiles=st.sampled_from([1, 2, 5]),
    vocab_axis=st.sampled_from([0, 1]),
    z_loss=st.sampled_from([0.0, 0.01]),
)
def test_loss_and_gradients_are_those_of_the_plain_form(
    tokens, vocab, num_tiles, vocab_axis, z_loss
):
    x, weight, labels, weights = make(tokens, 7, vocab, vocab_axis=vocab_axis)
    options = {"vocab_axis": vocab_axis, "z_loss": z_loss}

    def tiled(x, weight):
        tiles = split(weight, num_tiles, axis=vocab_axis)
        given_ = {"token_weights": weights, **options, **PIECES}
        return cross_entropy(tiles, x, labels, **given_).mean

    def whole(x, weight):
        return plain(x, weight, labels, weights, **options)

    assert_same(tiled, whole, x, weight)


def test_the_mean_over_a_mesh_is_exact_with_uneven_shards():
    """A batch that does not divide by 8, and a device where no token counts."""
    x, weight, labels, weights = make((13, 5), 6, 19)
    labels = labels.at[0].set(-1).at[1, 1:].set(-1)
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def sharded(x, weight):
        given_ = {"token_weights": weights, **PIECES}
        axes = ("replica", "fsdp")
        tiles = split(weight, 3)
        return cross_entropy_over(mesh, axes, tiles, x, labels, **given_).mean

    def whole(x, weight):
        return plain(x, weight, labels, weights)

    assert_same(sharded, whole, x, weight)
