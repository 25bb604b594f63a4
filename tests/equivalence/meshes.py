"""Trains a network with awkward leaves on any mesh, ZeRO stage and tier.

Its leaves divide by no number of devices: 3 x 5, 5 x 23 and 23 x 29, vectors of 5 and
of 23, and a scalar; the persistence threshold is so low that all of them but the scalar
are cut.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import zinf

# Replicas, and devices of each.
MESHES = {
    "1": (1, 1),
    "2": (1, 2),
    "4": (1, 4),
    "8": (1, 8),
    "2x4": (2, 4),
    "4x2": (4, 2),
}
ONE = "1"
STAGES = (0, 1, 2, 3)
# Where parameters and optimizer state rest; None is the fused step.
TIERS: dict[str, tuple[str, str] | None] = {
    "fused": None,
    "device": ("none", "none"),
    "host": ("cpu", "cpu"),
    "optimizer on host": ("none", "cpu"),
    "nvme": ("nvme", "nvme"),
}
STEPS, EXAMPLES, MICROBATCHES = 6, 32, 2
# A mesh decides in which order numbers are added: first the examples of each device,
# then devices among themselves, and shards of gradients for a norm. What is added for a
# loss or a norm is positive, so that an order changes a few of float32's last bits,
# which are 2^-23 each; and a step carries what it changes in a gradient into the next
# loss, made smaller by the learning rate. 16 of them are allowed.
BOUND = 16 * 2.0**-23


def drawn_batches(
    steps: int, examples: int, tokens: int, dim: int
) -> list[dict[str, np.ndarray]]:
    """For each step x [examples, tokens, dim] and targets y [examples, tokens, 3]."""
    random = np.random.default_rng(1)
    shapes = {"x": (examples, tokens, dim), "y": (examples, tokens, 3)}
    return [
        {k: random.standard_normal(s, np.float32) for k, s in shapes.items()}
        for _ in range(steps)
    ]


@dataclass(frozen=True)
class Trained:
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    params: dict[str, np.ndarray]

    def deviation(self, other: "Trained") -> float:
        """The largest of any loss or norm from the other's, relative to that."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    def is_bit_equal(self, other: "Trained") -> bool:
        """Whether losses, norms and parameters are all the same numbers."""
        same = [
            np.array_equal(self.params[k], other.params[k], equal_nan=True)
            for k in self.params | other.params
        ]
        return self.numbers == other.numbers and all(same)

    @property
    def numbers(self) -> tuple[float, ...]:
        return *self.losses, *self.grad_norms


def mesh(name: str) -> Mesh:
    replicas, shards = MESHES[name]
    return zinf.make_mesh(jax.devices()[: replicas * shards], num_replicas=replicas)


def init() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        values = random.standard_normal(shape, np.float32)
        return jnp.asarray(values * shape[0] ** -0.5)

    return {
        "up": normal(3, 5),
        "up_bias": normal(5),
        "mid": normal(5, 23),
        "mid_bias": normal(23),
        "out": normal(23, 29),
        "scale": jnp.float32(1.5),
    }


def loss(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(batch["x"] @ params["up"] + params["up_bias"][None])
    x = jnp.tanh(x @ params["mid"] + params["mid_bias"][None])
    out = params["scale"] * (x @ params["out"])
    return jnp.mean(jnp.square(out - batch["y"]))


def batches(num: int = STEPS) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    shapes = {"x": (EXAMPLES, 3), "y": (EXAMPLES, 29)}
    return [
        {k: random.standard_normal(s, np.float32) for k, s in shapes.items()}
        for _ in range(num)
    ]


def config(stage: int, tier: str, folder: str) -> dict[str, Any]:
    """Clipping at a norm below those that occur, and accumulation."""
    settings: dict[str, Any] = {
        "execution": "fused",
        "zero_optimization": {"stage": stage},
        "persistence_threshold": 1,
        "gradient_clipping": 0.05,
        "gradient_accumulation_steps": MICROBATCHES,
        "segment": {"max_bytes": 4 * (3 * 5 + 5 * 23 + 23), "remat": "always"},
        "memory": {"device": "64MiB", "host": "64MiB"},
    }
    placement = TIERS[tier]
    if placement is not None:
        params, state = placement
        settings["execution"] = "streamed"
        settings["zero_optimization"] |= {
            "offload_param": {"device": params},
            "offload_optimizer": {"device": state},
        }
        if "nvme" in placement:
            settings["memory"] |= {"nvme": [folder]}
    return settings


@cache
def train(mesh_name: str, stage: int, tier: str) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        settings = config(stage, tier, folder)
        on = mesh(mesh_name)
        engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings, mesh=on)
        metrics = [engine.step(batch) for batch in batches()]
        params = engine.params()
        engine.close()
    losses, norms = (tuple(m[k] for m in metrics) for k in ("loss", "grad_norm"))
    return Trained(losses, norms, params)


def check_each_restores_the_one_before(
    engines: Iterable[zinf.Engine], batch: Any, folder: Path
) -> None:
    """Engines on other meshes hold to the bit what the one before them saved."""
    last = None
    for number, engine in enumerate(engines):
        if last is None:
            engine.step(batch)
        else:
            engine.restore(last[0])
            engine.evaluate(batch)
        state = {a: np.array(engine.residents.read(a)) for a in engine.residents.specs}
        if last is not None:
            for array, content in state.items():
                np.testing.assert_array_equal(content, last[1][array], str(array))
        last = folder / f"saved {number}", state
        engine.save(last[0])
        engine.close()
