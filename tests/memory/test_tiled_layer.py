"""The largest layer that fits grows as the square root of the number of its tiles."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.tiers import stage_3
from zinf.core.engine.initialize import make_planner
from zinf.core.plan import InfeasibleError
from zinf.core.program import Tier
from zinf.core.step.shrink import Limits, compiled, cut
from zinf.core.step.stream import stream_segments

BUDGET = 8 << 20
TOKENS = 2
# A layer of h x 4h in float32 and its gradient are 32 h^2 bytes.
WHOLE = int((BUDGET / 32) ** 0.5)


def loss(params: Any, batch: jax.Array) -> jax.Array:
    x = batch + jnp.broadcast_to(params["before"], batch.shape)
    return jnp.mean(jnp.square(x @ params["kernel"]))


def fits(hidden: int, num_tiles: int) -> bool:
    """Whether it does in exactly so many tiles, within the budget of the device."""
    init = {"before": (hidden,), "kernel": (hidden, 4 * hidden)}
    specs = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in init.items()}
    config = {
        "execution": "streamed",
        "zero_optimization": stage_3("cpu"),
        "memory": {"device": BUDGET, "host": 1 << 40},
    }
    planner = make_planner(
        loss, lambda: jax.tree.map(jnp.zeros_like, specs), optax.adam(1e-3), config
    )
    limits = Limits(-(-hidden // num_tiles) * 16 * hidden)
    batch = jax.ShapeDtypeStruct((TOKENS, hidden), jnp.float32)
    source = planner.trace(batch, limits.param_bytes)
    layouts = planner.layouts(source)
    segmented = cut(planner, source, layouts, limits.param_bytes)
    tilings = segmented.program.tilings
    assert sum(len(t.tiles) for t in tilings) == (num_tiles if num_tiles > 1 else 0)
    made = compiled(planner, segmented, layouts, limits)
    try:
        plan = stream_segments(planner, segmented, made, limits).plan
    except InfeasibleError:
        return False
    assert plan.peak_bytes[Tier.DEVICE] <= BUDGET
    return True


@pytest.mark.parametrize("num_tiles", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_n_tiles_allow_root_n_times_the_width(num_tiles):
    """0.85 of what the law allows fits, and what it forbids does not."""
    most = WHOLE * num_tiles**0.5
    width = int(0.85 * most) // 16 * 16
    assert fits(width, num_tiles)
    beyond = int(1.05 * most) // 16 * 16
    assert not fits(beyond, num_tiles)
