"""Gradients of lookups that are left as rows: the same numbers in less memory."""

import numpy as np
import pytest

from tests.equivalence.models import LENGTH, Model
from tests.equivalence.training import (
    FUSED,
    ON_DEVICE,
    ON_NVME,
    OPTIMIZERS,
    Run,
    Setting,
    assert_bit_equal,
    run_of,
)
from zinf.core.plan import Plan
from zinf.core.program import Tier
from zinf.core.segment.executables import BodyExecutables
from zinf.models import GPTConfig, init_and_loss

BOTH_16 = "bf16 accumulation"


def draw(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Few words, so that each is read several times."""
    return {"tokens": random.integers(0, 40, (size, LENGTH + 1), np.int32)}


def gpt(*, is_tied: bool) -> Model:
    shape = GPTConfig(
        vocab_size=500,
        max_length=LENGTH,
        num_layers=2,
        num_heads=2,
        embed_dim=16,
        tied_embeddings=is_tied,
    )
    config = {"persistence_threshold": 1}
    return Model("gpt", *init_and_loss(shape, seed=0), draw, config=config)


def trained(model: Model, setting: Setting, folder: str = "") -> tuple[Run, Plan]:
    config = setting.config(model, folder)
    with model.start(OPTIMIZERS["adam"], config) as engine:
        batches = model.batches(3, setting.num_microbatches)
        metrics = [engine.step(batch) for batch in batches]
        return run_of(metrics, engine.params()), engine.plan


def has_rows(plan: Plan) -> bool:
    roles = {array.role for x in plan.instructions for array, _ in x.writes}
    return "gradient rows" in roles


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", BOTH_16])
def test_numbers_are_the_same_to_the_bit_and_on_the_drive(name, monkeypatch, tmp_path):
    tied = gpt(is_tied=True)
    found, plan = trained(tied, Setting(ON_DEVICE, name))
    on_drive, drive_plan = trained(tied, Setting(ON_NVME, name), str(tmp_path))
    assert Tier.NVME in drive_plan.homes.values()
    monkeypatch.setattr(BodyExecutables, "lookups", {})
    whole, whole_plan = trained(tied, Setting(ON_DEVICE, name))
    assert_bit_equal(found, whole)
    assert_bit_equal(on_drive, whole)
    assert has_rows(plan) and has_rows(drive_plan) and not has_rows(whole_plan)


@pytest.mark.slow
def test_the_first_of_several_microbatches_begins_the_sum():
    apart = gpt(is_tied=False)
    found, plan = trained(apart, Setting(ON_DEVICE, "accumulation"))
    assert has_rows(plan)
    # A gradient that is alone is no sum, and stays as it was.
    assert not has_rows(trained(apart, Setting(ON_DEVICE))[1])
    fused, _ = trained(apart, Setting(FUSED, "accumulation"))
    # Sums in another order through the steps.
    np.testing.assert_allclose(found.losses, fused.losses, rtol=1e-4)
