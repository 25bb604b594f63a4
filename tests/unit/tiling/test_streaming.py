"""zinf streams tile by tile: each is a parameter, and can be a segment of its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.robustness.small import on_nvme
from zinf import tiling
from zinf.core.segment import named_leaves, segment_loss, trace_loss

TOKENS, DIM, HIDDEN, WORDS = 12, 32, 64, 60
BATCH = {
    "tokens": np.arange(TOKENS, dtype=np.int32) * 7 % WORDS,
    "labels": np.arange(TOKENS, dtype=np.int32) * 11 % WORDS,
}


@partial(jax.jit, static_argnums=1)
def init(key, dtype=jnp.float32):
    k = jax.random.split(key, 4)
    wide = 2 * DIM
    return {
        "embedding": tiling.split(
            jax.random.normal(k[0], (WORDS, DIM), dtype), 2, axis=0
        ),
        "up": tiling.LinearTiles.init(k[1], (DIM, wide), out_splits=2, dtype=dtype),
        "down": tiling.LinearTiles.init(k[2], (wide, DIM), in_splits=2, dtype=dtype),
        "mlp": tiling.MlpTiles.init(k[3], DIM, HIDDEN, splits=2, dtype=dtype),
        "head": tiling.split(jax.random.normal(k[0], (DIM, WORDS), dtype), 2),
    }


def loss(params, batch):
    x = tiling.embed(params["embedding"], batch["tokens"])
    hidden = tiling.linear_parts(params["up"], [x])
    (down,) = tiling.linear_parts(params["down"], list(map(jnp.tanh, hidden)))
    x = x + down
    x = x + tiling.mlp(params["mlp"], x)
    return tiling.cross_entropy(params["head"], x, batch["labels"]).mean


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_tile_is_a_segment_and_little_is_carried_past_it(dtype):
    params = jax.eval_shape(lambda: init(jax.random.key(0), dtype))
    largest = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    batch = jax.eval_shape(lambda: BATCH)
    source = trace_loss(loss, params, batch, max_remat_bytes=0)
    # With room for a bias beside a kernel.
    limit = largest + 4 * HIDDEN
    program = segment_loss(source, frozen=(), splittable=(), max_bytes=limit).program
    kernels = {name for name, x in named_leaves(params).items() if x.ndim == 2}
    assert len(kernels) == 2 + 2 + 2 + 4 + 2
    vectors, word = 4 * TOKENS * DIM, 4 * TOKENS
    for segment in program.segments:
        names = {array.path for array in segment.params}
        assert len(names & kernels) <= 1
        # A tile reads its input, a sum so far, and a hidden tile or what is added to
        # at last; one of the head two numbers a token of each tile before.
        tiles_before = 1 if any(n.startswith("head") for n in names) else 0
        most = 4 * vectors + (2 * tiles_before + 1) * word
        given = sum(program.values[v].nbytes for v in segment.inputs)
        assert given <= most, segment.name


def test_training_from_nvme_is_that_of_plain_jax(tmp_path):
    """With all state on the drive, tile by tile."""
    params = init(jax.random.key(0))
    largest = max(x.nbytes for x in jax.tree.leaves(params))
    config = {
        **on_nvme(tmp_path),
        "persistence_threshold": 256,
        "segment": {"max_bytes": largest + 4 * HIDDEN},
    }
    tx = optax.adamw(1e-2)
    found = zinf.verify(loss, params, tx, config, batch=BATCH, num_steps=2)
    assert found, repr(found)
    first, last = (ours for ours, _ in found.losses)
    assert last < first - 0.1
