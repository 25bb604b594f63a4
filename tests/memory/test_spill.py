"""What waits within a step goes to a slower tier when it must, with equal numbers."""

from pathlib import Path

import pytest

from tests.memory.small import (
    GENEROUS,
    NUM_LAYERS,
    PlansOnly,
    config,
    losses,
    moved,
    trained,
)
from zinf.core.program import Tier

LARGE = 512  # examples in a batch, so that values are larger than parameters
ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}
CLIPPED = {"gradient_clipping": 0.01}
# Each layer hands a value on: to the next, or to the mean.
NUM_WAITING = NUM_LAYERS


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses with values that wait on the device."""
    settings = config(tmp_path_factory.mktemp("values"))
    with trained(settings, size=LARGE) as (engine, metrics):
        assert moved(engine.plan, "value", Tier.NVME) == 0
        return losses(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [True, False])
def test_values_wait_on_the_host_when_told_to_or_when_the_device_is_small(
    in_memory: list[float], is_told: bool, tmp_path: Path
) -> None:
    if is_told:
        settings, device = config(tmp_path, **ON_HOST), GENEROUS
    else:
        plans = PlansOnly(config(tmp_path), size=LARGE)
        device = plans.smallest(Tier.DEVICE, value_tier=Tier.HOST)
        assert device < plans.smallest(Tier.DEVICE)
        settings = config(tmp_path, device=device)
    with trained(settings, size=LARGE) as (engine, metrics):
        # The loss and the norms come down too, as values of their own.
        assert moved(engine.plan, "value", Tier.HOST) >= NUM_WAITING
        assert moved(engine.plan, "value", Tier.NVME) == 0
        assert losses(metrics) == in_memory
        assert max(m["device_bytes"] for m in metrics) <= device


def test_values_wait_on_nvme_when_the_host_is_small_too(
    in_memory: list[float], tmp_path: Path
) -> None:
    plans = PlansOnly(config(tmp_path), size=LARGE)
    on_nvme = {"value_tier": Tier.NVME}
    device = plans.smallest(Tier.DEVICE, **on_nvme)
    host = plans.smallest(Tier.HOST, device=device, **on_nvme)
    settings = config(tmp_path, device=device, host=host)
    with trained(settings, size=LARGE) as (engine, metrics):
        assert moved(engine.plan, "value", Tier.NVME) == NUM_WAITING
        assert losses(metrics) == in_memory
        assert max(m["host_bytes"] for m in metrics) <= host
        ledger = engine.stores.nvme.ledger
        assert ledger.used_bytes == engine.plan.home_bytes[Tier.NVME]


def test_gradients_wait_on_nvme_when_clipping_holds_updates_back(
    tmp_path: Path,
) -> None:
    with trained(config(tmp_path / "large", **CLIPPED)) as (engine, metrics):
        assert moved(engine.plan, "gradient", Tier.NVME) == 0
        expected = losses(metrics)
    plans = PlansOnly(config(tmp_path, **CLIPPED))
    host = plans.smallest(Tier.HOST, gradient_tier=Tier.NVME)
    assert host < plans.smallest(Tier.HOST)
    with trained(config(tmp_path, host=host, **CLIPPED)) as (engine, metrics):
        assert moved(engine.plan, "gradient", Tier.NVME) == NUM_LAYERS
        assert losses(metrics) == expected
        assert max(m["host_bytes"] for m in metrics) <= host
