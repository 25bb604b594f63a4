"""Budgets that are too small are refused at once, with budgets that will do."""

from pathlib import Path
from typing import Any

import pytest

from tests.memory.small import (
    MATRIX_BYTES,
    NUM_LAYERS,
    batch,
    config,
    losses,
    start,
    trained,
)
from zinf import Engine
from zinf.core.memory import NvmeStore
from zinf.core.plan import InfeasibleError
from zinf.core.program import Tier

KEYS = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.NVME: "nvme_capacity"}
STATE_BYTES = 3 * NUM_LAYERS * MATRIX_BYTES

SMALL = {
    "device": {"device": 1000},
    "host": {"host": 1000},
    # Less than the values of a layer alone: tiles of its matrix would not help.
    "device and host": {"device": 3000, "host": 3000},
    "nvme": {"nvme_capacity": STATE_BYTES - 1},
    "all": {"device": 1, "host": 1, "nvme_capacity": 1},
}
# Arrays are placed by budget: the fastest tier first.
BY_BUDGET: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def within(folder: Path, budgets: dict[str, int], **rest: Any) -> dict[str, Any]:
    settings = config(folder, **rest)
    settings["memory"] |= budgets
    return settings


def refuse(engine: Engine, folder: Path) -> InfeasibleError:
    """The error of the first batch, which leaves no trace."""
    with pytest.raises(InfeasibleError) as caught:
        engine.prepare(batch())
    assert not engine.is_placed
    assert not (folder / "nvme").exists()
    return caught.value


def budgets_of(error: InfeasibleError) -> dict[str, int]:
    return {KEYS[t]: short.needed_bytes for t, short in error.shortages.items()}


@pytest.mark.parametrize(
    ("placement", "small"),
    [
        ("on nvme", "device"),
        # By budget, what does not fit on nvme stays in memory.
        ("by budget", "all"),
        pytest.param("on nvme", "device and host", marks=pytest.mark.slow),
        pytest.param("by budget", "host", marks=pytest.mark.slow),
    ],
)
def test_the_budgets_of_the_error_will_do(
    placement: str, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = BY_BUDGET if placement == "by budget" else {}
    budgets = SMALL[small]
    engine = start(within(tmp_path, budgets, **rest))
    with monkeypatch.context() as patch:
        patch.setattr(NvmeStore, "__init__", lambda *_: pytest.fail("opened"))
        error = refuse(engine, tmp_path)
    needed = budgets_of(error)
    assert needed.keys() <= budgets.keys()
    for key, nbytes in needed.items():
        assert nbytes > budgets[key]
        least = "at least " * error.is_least
        assert f"memory.{key} to {least}{nbytes:,}" in str(error)
    with trained(within(tmp_path, {**budgets, **needed}, **rest)) as (engine, metrics):
        assert len(losses(metrics)) == len(metrics)
        for tier in Tier:
            measured = max(m[f"{tier}_bytes"] for m in metrics)
            assert measured <= engine.plan.capacity_bytes[tier]


def test_one_byte_less_on_nvme_than_the_state_is_refused(tmp_path: Path) -> None:
    error = refuse(start(within(tmp_path, SMALL["nvme"])), tmp_path)
    assert budgets_of(error) == {"nvme_capacity": STATE_BYTES}


def test_an_engine_that_refused_a_batch_takes_a_smaller_one(tmp_path: Path) -> None:
    with trained(config(tmp_path), size=8) as (engine, _):
        device = engine.plan.peak_bytes[Tier.DEVICE]
    engine = start(config(tmp_path, device=device))
    with pytest.raises(InfeasibleError, match="memory.device"):
        engine.step(batch(size=4096))
    assert engine.step(batch(size=8))["step"] == 1
    # Everything is in place now; a batch that does not fit changes nothing.
    with pytest.raises(InfeasibleError, match="memory.device"):
        engine.step(batch(size=4096))
    assert engine.num_steps == 1
    assert engine.step(batch(size=8))["step"] == 2
    engine.close()
