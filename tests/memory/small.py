"""A model of equal layers whose sizes are easy to add up, and its training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zinf
from tests.tiers import streamed
from zinf.core.engine.initialize import make_planner
from zinf.core.plan import InfeasibleError, Plan, StepOptions, Transfer, build
from zinf.core.program import Tier
from zinf.core.step.run.streamed import Streamed

NUM_LAYERS, WIDTH, BATCH, STEPS = 6, 64, 8, 3
MATRIX_BYTES = 4 * WIDTH * WIDTH  # one layer, and each of its two moments
VALUE_BYTES = 4 * BATCH * WIDTH  # what one layer hands to the next
GENEROUS = 1 << 30


def init() -> dict[str, list[Any]]:
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
    return {"layers": [jax.random.normal(k, (WIDTH, WIDTH)) / 8 for k in keys]}


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x))


def batch(step: int = 0, size: int = BATCH) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(step).random((size, WIDTH), np.float32)}


def config(
    folder: Path, *, device: int = GENEROUS, host: int = GENEROUS, **rest: Any
) -> dict[str, Any]:
    """All state on nvme, and segments streamed within these budgets."""
    config = streamed("nvme", folder / "nvme", segment={})
    config["memory"] |= {"device": device, "host": host}
    return config | rest


def start(settings: dict[str, Any], **options: Any) -> zinf.Engine:
    return zinf.initialize(loss, init, optax.adam(1e-2), settings, **options)


@contextmanager
def trained(
    settings: dict[str, Any], *, size: int = BATCH
) -> Iterator[tuple[zinf.Engine, list[dict[str, Any]]]]:
    """An engine after some steps, and their metrics."""
    engine = start(settings)
    try:
        yield engine, [engine.step(batch(i, size)) for i in range(STEPS)]
    finally:
        engine.close()


def losses(metrics: list[dict[str, Any]]) -> list[float]:
    return [m["loss"] for m in metrics]


class PlansOnly:
    """Plans within any budgets, without compiling again for each."""

    def __init__(self, settings: dict[str, Any], *, size: int = BATCH):
        planner = make_planner(loss, init, optax.adam(1e-2), settings)
        prepared = planner.plan(jax.eval_shape(lambda: batch(0, size)))
        assert isinstance(prepared, Streamed)
        self.prepared = prepared
        self.capacity = planner.capacity()

    def plan(
        self,
        *,
        value_tier: Tier = Tier.DEVICE,
        gradient_tier: Tier = Tier.HOST,
        **budgets: int,
    ) -> Plan:
        prepared = self.prepared
        capacity = {**self.capacity, **{Tier(t): n for t, n in budgets.items()}}
        arranged = prepared.arranged
        options = StepOptions(
            arranged.options.num_microbatches,
            arranged.options.updates_in_backward,
            value_tier,
            gradient_tier,
        )
        return build(arranged.catalog, arranged.units, capacity, options)

    def smallest(self, tier: Tier, **options: Any) -> int:
        """The smallest feasible budget of a tier, found by bisection."""
        low, high = 0, self.capacity[tier]
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self.plan(**options, **{tier.value: middle})
            except InfeasibleError:
                low = middle
            else:
                high = middle
        return high


def moved(plan: Plan, role: str, target: Tier) -> int:
    """How many arrays of a role a step moves to a tier."""
    return sum(
        array.role == role
        for instruction in plan.instructions
        if isinstance(instruction.operation, Transfer)
        and instruction.operation.target == target
        for array in instruction.operation.arrays
    )
