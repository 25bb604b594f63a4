"""Budgets change what is moved, and when, but no number."""

import numpy as np
import pytest

from tests.equivalence.models import EQUINOX, PYTREE, Model
from tests.equivalence.training import OPTIMIZERS, streamed_config
from zinf.plan import Plan, Run
from zinf.program import Tier

STEPS = 4
KEYS = {Tier.DEVICE: "device", Tier.HOST: "host"}


def train(
    model: Model, folder: str, budgets: dict[Tier, int], num_microbatches: int
) -> tuple[list[float], Plan]:
    """`(losses, plan)` with everything on nvme."""
    config = streamed_config(("nvme", "nvme"), folder)
    config["memory"] |= {KEYS[tier]: nbytes for tier, nbytes in budgets.items()}
    config["gradient_accumulation_steps"] = num_microbatches
    engine = model.start(OPTIMIZERS["adam"], config)
    batches = model.batches(STEPS, num_microbatches)
    metrics = [engine.step(batch) for batch in batches]
    plan = engine.plan
    engine.close()
    for m in metrics:
        assert all(m[f"{tier}_bytes"] <= budget for tier, budget in budgets.items())
    return [m["loss"] for m in metrics], plan


def segments(plan: Plan) -> list[str]:
    runs = (i.operation for i in plan.instructions)
    return [run.name for run in runs if isinstance(run, Run)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tiers", [(Tier.DEVICE,), (Tier.HOST,), tuple(KEYS)])
def test_half_the_bytes_give_the_same_losses(tiers, tmp_path):
    expected, plan = train(PYTREE, str(tmp_path / "ample"), {}, 3)
    budgets = {tier: int(0.55 * plan.peak_bytes[tier]) for tier in tiers}
    losses, tight = train(PYTREE, str(tmp_path / "tight"), budgets, 3)
    assert segments(tight) == segments(plan)
    assert losses == expected


@pytest.mark.slow
def test_smaller_segments_differ_by_rounding_alone(tmp_path):
    """A layer that does not fit is cut, and XLA orders the sums of its parts anew."""
    expected, plan = train(EQUINOX, str(tmp_path / "ample"), {}, 1)
    budgets = {Tier.DEVICE: int(0.65 * plan.peak_bytes[Tier.DEVICE])}
    losses, tight = train(EQUINOX, str(tmp_path / "tight"), budgets, 1)
    assert len(segments(tight)) > len(segments(plan))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
