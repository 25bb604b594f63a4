"""Budgets are hard, and what is predicted is what is measured."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.memory.small import (
    BATCH,
    GENEROUS,
    MATRIX_BYTES,
    NUM_LAYERS,
    STEPS,
    VALUE_BYTES,
    PlansOnly,
    config,
    losses,
    trained,
)
from zinf.core.plan import Link
from zinf.core.program import Tier
from zinf.core.step.run import run, transfer


@pytest.fixture(scope="module")
def budgets(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """From generous to the smallest with which there is a plan, tier after tier."""
    plans = PlansOnly(config(tmp_path_factory.mktemp("plans")))
    device = plans.smallest(Tier.DEVICE)
    host = plans.smallest(Tier.HOST, device=device)
    peak = plans.plan().peak_bytes
    return [
        {},
        {"device": peak[Tier.DEVICE], "host": peak[Tier.HOST]},
        {"device": (peak[Tier.DEVICE] + device) // 2},
        {"device": device, "host": (peak[Tier.HOST] + host) // 2},
        {"device": device, "host": host},
    ]


@pytest.fixture(scope="module")
def generous_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with trained(config(tmp_path_factory.mktemp("generous"))) as (_, metrics):
        return losses(metrics)


@pytest.mark.parametrize(
    ("number", "at_once"),
    [
        (1, 1),
        (4, 2),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((4, 1), (2, 2), (3, 3))),
    ],
)
def test_no_tier_exceeds_its_prediction_or_budget(
    budgets: list[dict[str, int]],
    generous_losses: list[float],
    number: int,
    at_once: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor if a device has several programs, as accelerators do."""
    monkeypatch.setattr(run, "programs_at_once", lambda _: at_once)
    budget = budgets[number]
    with trained(config(tmp_path, **budget)) as (engine, metrics):
        plan = engine.plan
        for tier in Tier:
            measured = max(m[f"{tier}_bytes"] for m in metrics)
            assert plan.home_bytes[tier] <= measured <= plan.peak_bytes[tier]
            assert plan.peak_bytes[tier] <= plan.capacity_bytes[tier]
        engine.flush()
        for tier in Tier:
            # Nothing is left but what is at home.
            assert engine.stores[tier].ledger.used_bytes == plan.home_bytes[tier]
        assert losses(metrics) == generous_losses


def test_the_smallest_budgets_are_what_one_layer_needs(
    budgets: list[dict[str, int]],
) -> None:
    smallest = budgets[-1]
    # A layer with its gradient, and the values that wait for the backward pass; the
    # update has a parameter, two moments and a gradient. The rest is workspace.
    values = (NUM_LAYERS + 1) * VALUE_BYTES
    assert smallest["device"] >= 2 * MATRIX_BYTES + VALUE_BYTES
    assert smallest["device"] < 5 * MATRIX_BYTES + 2 * values
    assert 4 * MATRIX_BYTES <= smallest["host"] < 9 * MATRIX_BYTES + 2 * values


def test_less_room_means_more_traffic_and_never_other_bytes(
    budgets: list[dict[str, int]], tmp_path: Path
) -> None:
    plans = PlansOnly(config(tmp_path))
    reads = [plans.plan(**b).link_bytes(Link.NVME_READ) for b in budgets]
    state_bytes = 3 * NUM_LAYERS * MATRIX_BYTES
    # Everything is read once; parameters once more for the backward pass, and once
    # more for the update, when no copy of them can stay.
    assert reads == sorted(reads)
    assert reads[0] == state_bytes
    assert reads[-1] <= state_bytes + 2 * NUM_LAYERS * MATRIX_BYTES
    for budget in budgets:
        assert plans.plan(**budget).link_bytes(Link.NVME_WRITE) == state_bytes


class Meter:
    """Counts the bytes of arrays that go onto the device and come off it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.moved: Counter[str] = Counter()
        to_devices, to_shares = transfer.to_devices, transfer.to_shares

        def counting_to_devices(shares: Any, layouts: Any, pages: Any) -> Any:
            self.moved["h2d"] += sum(x.nbytes for x in shares)
            return to_devices(shares, layouts, pages)

        def counting_to_shares(arrays: Any, layouts: Any, pages: Any) -> Any:
            shares = to_shares(arrays, layouts, pages)
            self.moved["d2h"] += sum(x.nbytes for x in shares)
            return shares

        monkeypatch.setattr(transfer, "to_devices", counting_to_devices)
        monkeypatch.setattr(transfer, "to_shares", counting_to_shares)


def test_every_link_moves_what_the_plan_says(
    budgets: list[dict[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained(config(tmp_path, **budgets[-1])) as (engine, metrics):
        meter = Meter(monkeypatch)
        nvme = engine.stores.nvme
        before = nvme.read_bytes, nvme.written_bytes
        last = engine.step({"x": np.ones((BATCH, 64), np.float32)})
        measured = {
            Link.NVME_READ: nvme.read_bytes - before[0],
            Link.NVME_WRITE: nvme.written_bytes - before[1],
            Link.H2D: meter.moved["h2d"],
            Link.D2H: meter.moved["d2h"],
        }
        reported = {
            Link.NVME_READ: last["nvme_read_bytes"],
            Link.NVME_WRITE: last["nvme_write_bytes"],
            Link.H2D: last["h2d_bytes"],
            Link.D2H: last["d2h_bytes"],
        }
        for link, moved in measured.items():
            assert moved == reported[link] == engine.plan.link_bytes(link) > 0
    assert len(metrics) == STEPS
    assert budgets[-1]["host"] < GENEROUS
