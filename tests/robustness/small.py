"""A network of two layers, small enough to break in many ways in a second."""

import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.tiers import streamed
from zinf import Engine
from zinf.core.program import ArrayId
from zinf.core.step.run.streamed import StreamedRunner

DIM, BATCH = 8, 4


def init() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [
        {"w": jax.random.normal(k, (DIM, DIM)) * 0.3, "b": jnp.zeros(DIM)}
        for k in keys[:2]
    ]
    return {"layers": layers, "out": jax.random.normal(keys[2], (DIM, DIM)) * 0.3}


def loss_fn(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    x = batch["x"].astype(params["out"].dtype)
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"][None])
    error = (x @ params["out"]).astype(jnp.float32) - batch["y"]
    return jnp.mean(jnp.square(error))


def draw(seed: int = 0, size: int = BATCH) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((size, DIM), np.float32)
    return {"x": x, "y": np.sin(x)}


def on_nvme(folder: Path, **settings: Any) -> dict[str, Any]:
    """A config that streams everything from a folder, and keeps no residuals."""
    return streamed("nvme", folder, **settings)


def with_tight_host(config: dict[str, Any]) -> dict[str, Any]:
    """With a host budget in which gradients find no room."""
    memory = config["memory"]
    with pytest.raises(ValueError, match="Raise memory.host to at least") as caught:
        refused = config | {"memory": memory | {"host": 1}}
        zinf.initialize(loss_fn, init, optax.adam(1e-2), refused, batch=draw())
    needed = re.search(r"memory\.host to at least ([0-9,]+)", str(caught.value))
    assert needed is not None
    # Enough for the largest update, and for nothing beside it.
    host_bytes = int(needed[1].replace(",", "")) + 84
    return config | {"memory": memory | {"host": host_bytes}}


def content(engine: Engine) -> dict[ArrayId, bytes]:
    """The bytes of every persistent array."""
    residents = engine.residents
    return {a: np.array(residents.read(a)).tobytes() for a in residents.specs}


def expect_at_rest(engine: Engine) -> None:
    """Between steps every tier holds what rests on it, and no worker is alive."""
    used = {t: engine.stores[t].ledger.used_bytes for t in engine.stores.tiers}
    resting = {t: engine.plan.home_bytes[t] for t in engine.stores.tiers}
    runner = engine._runners.current
    if isinstance(runner, StreamedRunner) and runner.pending is not None:
        for gradient, tier in runner.arranged.pending:
            resting[tier] += runner.arranged.catalog.nbytes(gradient)
    assert used == resting
    assert workers() == []


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("zinf ")]
