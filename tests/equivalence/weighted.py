"""A loss that says its weight, on rows with very different numbers of tokens."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import zinf

DIM, ROWS, TOKENS = 8, 32, 30
# Trained tokens of each row: a mean of microbatches' means is far from the mean.
COUNTS = np.repeat([1, 1, 1, 30, 2, 30, 1, 7], ROWS // 8)
WEIGHTS = {
    "first": np.random.default_rng(1).normal(size=(DIM, DIM)).astype(np.float32) / 2,
    "second": np.random.default_rng(2).normal(size=(DIM, 3)).astype(np.float32) / 2,
}
# A sum of some hundred float32 numbers in another order differs by units of rounding.
RTOL = 2e-6
STREAMED = {"execution": "streamed", "segment": {"max_bytes": 4 * DIM * DIM}}


def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(ROWS, TOKENS, DIM)).astype(np.float32),
        "y": random.normal(size=(ROWS, TOKENS, 3)).astype(np.float32) * 3,
        "mask": (np.arange(TOKENS) < COUNTS[:, None]).astype(np.float32),
    }


def loss(params: Any, batch: Any) -> zinf.Weighted:
    hidden = jnp.tanh(batch["x"].astype(params["first"].dtype) @ params["first"])
    error = (hidden @ params["second"]).astype(jnp.float32) - batch["y"]
    losses = jnp.sum(jnp.square(error), axis=-1) * batch["mask"]
    return zinf.Weighted(jnp.sum(losses), jnp.sum(batch["mask"]))


def whole_mean(params: Any, batch: Any) -> Any:
    return loss(params, batch).mean
