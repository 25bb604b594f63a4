"""Gradients of lookups that are left as rows: the same numbers in less memory."""

from functools import cache
from typing import Any

import chex
import numpy as np
import optax
import pytest

import zinf
from zinf.models import GPTConfig, init_and_loss
from zinf.program import Tier
from zinf.segment.executables import BodyExecutables

STEPS, BATCH, LENGTH, VOCAB = 20, 4, 8, 500
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16, accumulation and clipping": {
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.05,
    },
}
ON_NVME = {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}}


def trained(
    settings: dict[str, Any], *, is_tied: bool = True, steps: int = STEPS
) -> tuple[Any, ...]:
    """The losses of some steps, the parameters after them and the plan."""
    model = GPTConfig(
        vocab_size=VOCAB,
        max_length=LENGTH,
        num_layers=2,
        num_heads=2,
        embed_dim=16,
        tied_embeddings=is_tied,
    )
    init, loss = init_and_loss(model, seed=0)
    random = np.random.default_rng(0)
    # Few words, so that each is read several times.
    batches = random.integers(0, 40, (STEPS, BATCH, LENGTH + 1), np.int32)
    # A segment that leaves rows keeps no residuals; nor need the others, to be quick.
    segment = {"segment": {"remat": "always"}}
    config = {"execution": "streamed", **segment, **settings}
    engine = zinf.initialize(loss, init, optax.adamw(3e-3), config)
    losses = [engine.step({"tokens": x})["loss"] for x in batches[:steps]]
    params, plan = engine.params(), engine.plan
    engine.close()
    return losses, params, plan


@cache
def trained_as(name: str) -> tuple[Any, ...]:
    return trained(VARIANTS[name])


@pytest.mark.slow
@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_parameters_are_the_same_to_the_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, params, plan = trained_as(name)
    monkeypatch.setattr(BodyExecutables, "lookups", {})
    whole_losses, whole_params, whole_plan = trained(VARIANTS[name])
    assert losses == whole_losses
    chex.assert_trees_all_equal(params, whole_params, strict=True)
    assert "gradient rows" in _roles(plan)
    assert "gradient rows" not in _roles(whole_plan)


@pytest.mark.slow
def test_the_first_of_several_microbatches_begins_the_sum() -> None:
    settings = {"gradient_accumulation_steps": 2}
    losses, _, plan = trained(settings, is_tied=False)
    assert "gradient rows" in _roles(plan)
    # A gradient that is alone is no sum, and stays as it was.
    assert "gradient rows" not in _roles(trained({}, is_tied=False, steps=1)[2])
    fused, *_ = trained({**settings, "execution": "fused"}, is_tied=False)
    # Sums in another order through twenty steps.
    np.testing.assert_allclose(losses, fused, rtol=1e-4)


@pytest.mark.slow
def test_a_step_on_the_drive_gives_the_same_losses(tmp_path: Any) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 1, **ON_NVME}
    settings = {
        "zero_optimization": zero,
        "memory": {"nvme": [str(tmp_path)]},
    }
    losses, _, plan = trained(settings)
    assert losses == trained_as("plain")[0]
    assert plan.homes and Tier.NVME in plan.homes.values()


def _roles(plan: Any) -> set[str]:
    return {array.role for x in plan.instructions for array, _ in x.writes}
