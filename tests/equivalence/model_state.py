"""A network whose loss returns state: running means, a count, and a random key."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.equivalence.models import Model

DIM, LAYERS = 8, 3


def init() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {"layers": [{"w": jax.random.normal(k, (DIM, DIM)) * 0.3} for k in keys]}


def initial_state() -> Any:
    statistics = [{"mean": jnp.zeros(DIM), "count": jnp.int32(0)}] * LAYERS
    return {"layers": statistics, "key": jax.random.key(3, impl="unsafe_rbg")}


def loss(params: Any, state: Any, batch: Any) -> Any:
    """Centred by a running mean, with noise from a key that goes on in every step."""
    key, noise_key = jax.random.split(state["key"])
    x, new = batch + 0.1 * jax.random.normal(noise_key, batch.shape), []
    for p, s in zip(params["layers"], state["layers"], strict=True):
        h = x @ p["w"]
        mean = 0.9 * s["mean"] + 0.1 * h.mean(0)
        new.append({"mean": mean, "count": s["count"] + 1})
        x = x + jnp.tanh(h - mean[None])
    return jnp.mean(jnp.square(x)), {"layers": new, "key": key}


def draw(random: np.random.Generator, size: int) -> np.ndarray:
    return random.standard_normal((size, DIM), np.float32)


OPTIONS = {"model_state": initial_state, "state_rules": {"layers/*/count": "last"}}
NORMED = Model("normed", init, loss, draw, options=OPTIONS)
