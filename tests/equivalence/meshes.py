"""A network with awkward leaves, for any mesh, ZeRO stage and tier.

Its leaves divide by no number of devices: 3 x 5, 5 x 23 and 23 x 29, vectors of 5 and
of 23, and a scalar; the persistence threshold is so low that all of them but the scalar
are cut.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.equivalence import training
from tests.equivalence.models import Model
from tests.equivalence.training import BOTH, BOUND, Run, Setting

__all__ = ["BOUND", "MESHES", "ONE", "STAGES", "TIERS", "train"]

ONE = "1"
MESHES = (ONE, "2", "4", "8", "2x4", "4x2")
STAGES = (0, 1, 2, 3)
# Where parameters and optimizer state rest; None is the fused step.
TIERS: dict[str, tuple[str, str] | None] = {
    "fused": None,
    "device": ("none", "none"),
    "host": ("cpu", "cpu"),
    "optimizer on host": ("none", "cpu"),
    "nvme": ("nvme", "nvme"),
}
STEPS, EXAMPLES, MICROBATCHES = 3, 32, 2


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


def draw(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    shapes = {"x": (size, 3), "y": (size, 29)}
    return {k: random.standard_normal(s, np.float32) for k, s in shapes.items()}


AWKWARD = Model(
    "awkward",
    init,
    loss,
    draw,
    size=EXAMPLES // MICROBATCHES,
    config={
        "persistence_threshold": 1,
        "segment": {"max_bytes": 4 * (3 * 5 + 5 * 23 + 23), "remat": "always"},
    },
)


def batches(num: int = STEPS) -> list[dict[str, np.ndarray]]:
    return AWKWARD.batches(num, MICROBATCHES)


def setting(mesh: str, stage: int, tier: str) -> Setting:
    """Clipping at a norm below those that occur, and accumulation."""
    return Setting(TIERS[tier] or "fused", BOTH, mesh, stage)


def config(stage: int, tier: str, folder: str) -> dict[str, Any]:
    made = setting(ONE, stage, tier).config(AWKWARD, folder)
    made["memory"] = {"device": "64MiB", "host": "64MiB"} | made.get("memory", {})
    return made


def train(mesh: str, stage: int, tier: str) -> Run:
    return training.train(AWKWARD, setting(mesh, stage, tier))
