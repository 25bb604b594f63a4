"""A tied, partly frozen model with leaves of all kinds, and engines that train it."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zinf
from tests.tiers import streamed

VOCAB, DIM, LAYERS, BATCH, LENGTH = 24, 8, 3, 4, 6
BF16 = {"bf16": {"enabled": True}}


def init(seed: int = 0, vocab: int = VOCAB, dim: int = DIM) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        # Read at both ends: tied, one leaf.
        "embed": jax.random.normal(keys[0], (vocab, dim)) * 0.1,
        # Stacked over layers.
        "blocks": {"w": jax.random.normal(keys[1], (LAYERS, dim, dim)) * 0.3},
        # A list, and frozen.
        "adapters": [jax.random.normal(keys[2], (dim, dim)) * 0.1, jnp.ones(dim)],
        "scale": jax.random.uniform(keys[3], ()),
        "rows.kept": jnp.arange(5),
    }


def loss_fn(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    tokens = batch["tokens"]
    x = params["embed"][tokens] * params["scale"]

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["blocks"]["w"])
    kernel, bias = params["adapters"]
    x = x + x @ kernel + bias[None, None]
    logits = (x @ params["embed"].T).astype(jnp.float32)
    picked = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(picked, tokens[:, 1:, None], axis=-1))


def draw(seed: int = 0, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"tokens": random.integers(0, vocab, (BATCH, LENGTH), np.int32)}


def on_nvme(folder: Path, **settings: Any) -> dict[str, Any]:
    """Everything on a drive, and the adapters frozen."""
    return streamed("nvme", folder, frozen=["adapters/*"], **settings)


ON_DEVICE = {"execution": "fused", "frozen": ["adapters/*"]}


def start(config: dict[str, Any], params: Any = init, tx: Any = None) -> zinf.Engine:
    tx = optax.adamw(1e-2) if tx is None else tx
    return zinf.initialize(loss_fn, params, tx, config, batch=draw())


def assert_same_trees(found: Any, expected: Any) -> None:
    """Equal in structure, dtypes and every bit."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    # Equality of numbers does not tell -0.0 from 0.0.
    chex.assert_trees_all_equal_comparator(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(),
        lambda a, b: f"the bits of {a} and {b}",
        found,
        expected,
    )


def flat(tree: Any) -> dict[str, np.ndarray]:
    """The leaves by the names that they have in a safetensors file."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
