"""A toy run for the workers of a cluster: a perceptron that saves every other step."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zinf
from zinf.checkpoint import Checkpoints
from zinf.data import Share
from zinf.ray import RayGroup

WIDTH, BATCH, STEPS = 16, 12, 12
Deed = Callable[[RayGroup, int], None]


def init() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)) for i, k in enumerate(keys)}


def loss(params: Mapping[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch @ params["w0"])
    return jnp.mean((hidden @ params["w1"] - batch) ** 2)


def samples() -> grain.MapDataset:
    drawn = np.random.default_rng(0).normal(size=(BATCH * STEPS, WIDTH))
    rows = list(drawn.astype(np.float32))
    return grain.MapDataset.source(rows)


def nothing(group: RayGroup, step: int) -> None: ...


def train(
    group: RayGroup, folder: Path, deed: Deed = nothing, checkpoints: str | None = None
) -> int:
    """Trains for STEPS steps; returns the process id.

    Args:
        deed: called before each step, with its number.
        checkpoints: a URL of object storage; None is a subfolder of `folder`.
    """
    config = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": 3},
        "persistence_threshold": 1,
    }
    tx = optax.adam(1e-2)
    engine = zinf.initialize(loss, init, tx, config, group=group)
    take = engine.step

    def step(batch: Any) -> Mapping[str, Any]:
        deed(group, engine.num_steps + 1)
        return take(batch)

    engine.step = step
    with Checkpoints(checkpoints or folder / "checkpoints") as opened:
        zinf.Trainer(
            engine,
            Share(samples(), BATCH, process=(group.index, group.count)),
            steps=STEPS,
            checkpoints=opened,
            checkpoint_every=2,
            metrics=folder / "metrics.jsonl",
        ).run()
    return os.getpid()
