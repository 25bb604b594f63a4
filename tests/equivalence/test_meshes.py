"""On every mesh, ZeRO stage and tier, training is that of one device.

`scripts/reports/mesh_matrix.py` runs all meshes, stages and tiers of one network.
"""

from itertools import product
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from tests.equivalence.meshes import AWKWARD, STAGES, TIERS
from tests.equivalence.networks import (
    ATTENTION,
    DROPLESS,
    FEW_ROUTED,
    GPT_CAPACITY,
    GPT_DROPLESS,
    LLAMA,
    ROUTED,
    STACKED,
    TRANSFORMER,
)
from tests.equivalence.training import (
    BOTH,
    BOUND,
    FUSED,
    MESHES,
    OFFLOADED,
    OPTIMIZERS,
    Setting,
    assert_bit_equal,
    mesh_of,
    train,
)

slow = pytest.mark.slow
FP16, BF16 = "fp16 accumulation", "bf16 clipping"
# Of the largest: each device rounds its part of a sum to 8 bits before devices add
# them, or to 11 bits.
BOUNDS = {BOTH: BOUND, BF16: 2.0**-7, FP16: 2.0**-10}
INSIDE = (("expert_parallel.expert_tensor_parallel_size", 2),)
TABLE = [
    (AWKWARD, "2", 1, "fused", BOTH),
    (AWKWARD, "2x4", 0, "nvme", BOTH),
    (AWKWARD, "8", 3, "device", BOTH),
    (AWKWARD, "4x2", 2, "optimizer on host", FP16),
    (AWKWARD, "4", 3, "host", BF16),
    (AWKWARD, "8", 0, "fused", FP16),
    (AWKWARD, "4", 2, "device", BF16),
    (AWKWARD, "2", 3, "nvme", FP16),
    (AWKWARD, "4x2", 1, "host", FP16),
    (AWKWARD, "2x4", 0, "device", FP16),
    (AWKWARD, "2x4", 1, OFFLOADED, BF16),
    (AWKWARD, "4x2", 3, OFFLOADED, BOTH),
    (FEW_ROUTED, "E+D", 2, "fused", BOTH),
    (ROUTED, "E", 0, "fused", BOTH),
    (ROUTED, "E+D", 2, "host", BOTH),
    (ROUTED, "E+D+R", 3, "device", BOTH),
    (ROUTED, "E+T+D", 1, "optimizer on host", BOTH),
    (ROUTED, "8", 3, "nvme", BOTH),
    (FEW_ROUTED, "E+D", 3, "fused", BF16),
    (ATTENTION, "T+D", 2, "fused", BOTH),
    (ATTENTION, "T", 1, "device", BOTH),
    (ATTENTION, "T+D+R", 3, "host", BOTH),
    (ATTENTION, "T+D", 0, "optimizer on host", BF16),
    (ATTENTION, "T+D", 3, "nvme", BF16),
    (GPT_CAPACITY, "E+T+D", 0, "host", BOTH),
    (GPT_DROPLESS, "E+T+D", 3, "fused", BOTH),
    (GPT_CAPACITY, "E+S+D", 3, "fused", BOTH),
    (GPT_DROPLESS, "E+S+D", 2, "nvme", BOTH),
    (STACKED, "S", 3, "fused", BOTH),
    (STACKED, "S+D", 1, "nvme", BOTH),
    (LLAMA, "S", 3, "optimizer on host", BOTH),
    (TRANSFORMER, "S+D", 0, "optimizer on host", BOTH),
    (GPT_CAPACITY, "E+d", 3, "fused", BOTH),
    (LLAMA, "S+d", 2, "nvme", BOTH),
]
CUT_INSIDE = [
    (GPT_CAPACITY, "E+T+D", 2, "nvme", BOTH),
    (GPT_DROPLESS, "E+T", 1, "fused", BOTH),
    (GPT_CAPACITY, "T+d", 3, "host", BOTH),
]
FAST = [TABLE[i] for i in (0, 1, 2, 12, 19, 28)]


def setting(mesh: str, stage: int, tier: str, name: str, more: Any = ()) -> Setting:
    place = OFFLOADED if tier == OFFLOADED else TIERS[tier] or FUSED
    return Setting(place, name, mesh, stage, more)


CASES = [pytest.param(*row, (), marks=() if row in FAST else slow) for row in TABLE]
CASES += [pytest.param(*row, INSIDE, marks=slow) for row in CUT_INSIDE]


@pytest.mark.parametrize(("model", "mesh", "stage", "tier", "name", "more"), CASES)
def test_losses_norms_and_routes_are_those_of_one_device(
    model, mesh, stage, tier, name, more
):
    # Two runs that round to 8 bits may choose other experts from the second step on.
    steps = 1 if name == BF16 and model is FEW_ROUTED else 3
    expected = train(model, Setting(FUSED, name, stage=0), steps=steps)
    found = train(model, setting(mesh, stage, tier, name, more), steps=steps)
    assert found.skipped == expected.skipped
    if name == FP16:
        np.testing.assert_allclose(found.losses, expected.losses, rtol=BOUNDS[name])
    else:
        np.testing.assert_allclose(found.numbers, expected.numbers, rtol=BOUNDS[name])
    # A choice of -1 is a token that was dropped.
    chex.assert_trees_all_equal(
        (found.aux, found.state), (expected.aux, expected.state)
    )
    if model in (ROUTED, FEW_ROUTED):
        assert np.any(expected.state)
        for router in expected.aux[0]:
            choices = np.stack([aux[router] for aux in expected.aux])
            assert (choices < 0).any() == (router != DROPLESS), router


def test_every_pair_occurs():
    """Guards the table above."""
    axes = [set(column) for column in zip(*TABLE, strict=True)]
    models, _, stages, tiers, names = axes
    assert stages == {*STAGES}
    assert tiers == {*TIERS, OFFLOADED}
    assert {mesh for _, mesh, *_ in (*TABLE, *CUT_INSIDE)} == MESHES.keys() - {"1"}

    def pairs(*columns: int) -> set[Any]:
        return {tuple(row[i] for i in columns) for row in TABLE}

    assert pairs(2, 3) >= {*product(STAGES, TIERS)}
    assert pairs(2, 4) >= {*product(STAGES, names)}
    assert pairs(3, 4) >= {*product(TIERS, names)}
    for model in (AWKWARD, ROUTED, ATTENTION):
        rows = [row for row in TABLE if row[0] == model]
        assert {row[2] for row in rows} == stages
        assert {row[3] for row in rows} >= {*TIERS}


SPREAD = [
    (AWKWARD, "8", ()),
    (FEW_ROUTED, "E+D", ()),
    (ATTENTION, "T+D", ()),
    (GPT_CAPACITY, "E+T+D", INSIDE),
]


@pytest.mark.parametrize("tier", ["host", "optimizer on host", "nvme"])
@pytest.mark.parametrize(
    ("model", "mesh", "more"),
    [pytest.param(*case, marks=slow if i else ()) for i, case in enumerate(SPREAD)],
)
def test_tiers_of_a_mesh_are_bit_equal(model, mesh, more, tier):
    expected, found = (
        train(model, setting(mesh, 3, t, BOTH, more)) for t in ("device", tier)
    )
    assert_bit_equal(found, expected)


CHAINS = [
    (
        AWKWARD,
        [
            ("8", 3, "nvme"),
            ("1", 0, "device"),
            ("2", 1, "optimizer on host"),
            ("4x2", 2, "host"),
            ("8", 3, "fused"),
        ],
    ),
    (
        FEW_ROUTED,
        [
            ("E+D", 3, "nvme"),
            ("E", 0, "fused"),
            ("8", 2, "host"),
            ("E+D+R", 3, "device"),
        ],
    ),
    (
        ATTENTION,
        [("T+D", 3, "nvme"), ("T+D+R", 0, "fused"), ("T", 1, "host"), ("1", 0, "host")],
    ),
    (
        GPT_CAPACITY,
        [
            ("E+T+D", 3, "nvme", INSIDE),
            ("E+T+D", 1, "host"),
            ("E+T", 0, "fused", INSIDE),
        ],
    ),
]


@slow
@pytest.mark.parametrize(("model", "chain"), CHAINS)
def test_a_run_is_saved_and_restored_on_any_mesh_stage_and_tier(
    model, chain, tmp_path: Path
):
    batch = model.batches(1, 2)[0]
    last: tuple[Path, dict[Any, Any]] | None = None
    for number, (mesh, stage, tier, *more) in enumerate(chain):
        made = setting(mesh, stage, tier, BOTH, *more)
        config = made.config(model, str(tmp_path / f"nvme {number}"))
        tx = OPTIMIZERS["adam"]
        with model.start(tx, config, mesh=mesh_of(mesh)) as engine:
            if last is None:
                engine.step(batch)
            else:
                engine.restore(last[0])
                engine.evaluate(batch)
            residents = engine.residents
            state = {a: np.array(residents.read(a)) for a in residents.specs}
            if last is not None:
                assert state.keys() == last[1].keys()
                for array, content in state.items():
                    np.testing.assert_array_equal(content, last[1][array], str(array))
            last = tmp_path / f"saved {number}", state
            engine.save(last[0])
