"""Optimizers that send signs train as DeepSpeed's classes do, and send as few bytes.

`scripts/reports/record_one_bit.py` recorded DeepSpeed's own classes on two ranks.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.checkpoint.saved import Saved
from zinf.core.engine.initialize import make_planner
from zinf.core.program import Role
from zinf.core.sharding import Phase
from zinf.core.step.compiled import compiled_runs, step_traffic
from zinf.core.step.run.whole import Fused
from zinf.core.topology import collectives_of

RECORDED = Path(__file__).parent / "one_bit.npz"
RANKS, UPDATES, RESTORED_AFTER = 2, 200, 130
SHAPES = {"even": (8, 16), "odd": (15, 9), "wide": (4, 36)}
DEVICES, FREEZE, ROWS, WIDE = 8, 8, 16, 512
OF_CONFIG = {
    "OneBitAdam": {"freeze_step": FREEZE},
    "OneBitLamb": {"freeze_step": FREEZE},
    "ZeroOneAdam": {
        "var_freeze_step": FREEZE,
        "var_update_scaler": FREEZE,
        "local_step_scaler": 1,
    },
}


def drawn(seed: int, *leading: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        k: random.standard_normal((*leading, *s), np.float32) for k, s in SHAPES.items()
    }


def to_targets(params: Any, batch: Any) -> jax.Array:
    """Its gradient by the examples of one device is their mean of p - target."""
    squares = [jnp.square(params[k][None] - batch[k]) for k in SHAPES]
    return 0.5 * sum(x.reshape(len(x), -1).sum(1) for x in squares).mean()


def recorded_config(kind: str, stage: int, params: dict[str, Any]) -> dict[str, Any]:
    warm_up = {"warmup_max_lr": 0.01, "warmup_num_steps": 20, "warmup_type": "linear"}
    return {
        "optimizer": {"type": kind, "params": params},
        "scheduler": {"type": "WarmupLR", "params": warm_up},
        "mesh": {"fsdp": RANKS},
        "zero_optimization": {"stage": stage},
        "persistence_threshold": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"),
    [("OneBitAdam", 0), ("OneBitAdam", 1), ("OneBitLamb", 1), ("ZeroOneAdam", 0)],
)
def test_all_phases_are_those_of_deepspeeds_class_also_after_a_restore(
    kind, stage, tmp_path
):
    with np.load(RECORDED) as file:
        recorded = dict(file)
    config = recorded_config(kind, stage, json.loads(str(recorded[kind])))
    engine = zinf.initialize(to_targets, drawn(0), None, config)
    for update in range(UPDATES):
        engine.step(drawn(1 + update, RANKS))
        if update + 1 == RESTORED_AFTER:
            engine.save(tmp_path / "saved")
            engine.close()
            engine = zinf.initialize(to_targets, drawn(0), None, config)
            engine.restore(tmp_path / "saved")
        for name in SHAPES:
            key = f"{kind}/{update + 1}/{name}"
            if key in recorded:
                found = np.asarray(engine.params()[name])
                np.testing.assert_allclose(found, recorded[key], atol=1e-6, err_msg=key)
    engine.close()


def config(kind: str | None, **more: Any) -> dict[str, Any]:
    found = {"mesh": {"fsdp": DEVICES}, **more}
    if kind is not None:
        found["optimizer"] = {"type": kind, "params": OF_CONFIG[kind]}
    return found


def wide() -> dict[str, jax.Array]:
    return {"bias": jnp.ones(WIDE), "w": jnp.ones((WIDE, WIDE))}


def square(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(batch["x"] @ params["w"] + params["bias"][None]))


def batch() -> dict[str, np.ndarray]:
    return {"x": np.ones((ROWS, WIDE), np.float32)}


def in_python() -> optax.GradientTransformation:
    return zinf.compressed(optax.adamw(1e-3), freeze_step=FREEZE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*OF_CONFIG, None])
def test_after_the_warm_up_a_sixteenth_of_the_bytes_is_sent(kind):
    tx = in_python() if kind is None else None
    made = make_planner(square, wide, tx, config(kind)).plan_batch(batch())
    sent = sum(x.sent_bytes for x in step_traffic(compiled_runs(made)).values())
    all_reduce = 2 * 4 * WIDE**2 * (DEVICES - 1) / DEVICES
    # All leaves go in the same messages: signs and scales, there and back.
    named = Counter(x.kind for x in collectives_of(made.program.step))
    assert (named["all-to-all"], named["all-gather"]) == (1, 3)
    # One bit in place of 32, a few scales, and the bias: as it is, or by signs too.
    bias = 2 * 4 * WIDE * (kind != "ZeroOneAdam")
    assert all_reduce / 33 < sent - bias < all_reduce / 31
    assert sent < all_reduce / 16


@pytest.mark.slow
def test_at_stage_1_signs_and_parameters_are_sent():
    more = {"zero_optimization": {"stage": 1}}
    made = make_planner(square, wide, None, config("OneBitAdam", **more)).plan_batch(
        batch()
    )
    sent = sum(x.sent_bytes for x in step_traffic(compiled_runs(made)).values())
    all_gather = 4 * WIDE**2 * (DEVICES - 1) / DEVICES
    assert all_gather < sent < all_gather * (1 + 1 / 15)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OneBitLamb", "ZeroOneAdam"])
def test_what_signs_lost_goes_over_to_another_number_of_devices(kind, tmp_path):
    def saved(engine: zinf.Engine, name: str) -> list[np.ndarray]:
        engine.save(tmp_path / name)
        with Saved(tmp_path / name) as found:
            slots = [a for a in found.arrays if a.role == Role.ERROR and a.path == "w"]
            return [found.read(a) for a in sorted(slots, key=lambda a: a.slot)]

    few, many = {"mesh": {"fsdp": 2}}, {"mesh": {"fsdp": DEVICES}}
    random = np.random.default_rng(0)
    rows = {"x": random.standard_normal((ROWS, WIDE), np.float32)}
    with zinf.initialize(square, wide, None, config(kind, **few)) as engine:
        for _ in range(FREEZE + 4):
            engine.step(rows)
        before = saved(engine, "few")
    with zinf.initialize(square, wide, None, config(kind, **many)) as engine:
        engine.restore(tmp_path / "few")
        engine.step(rows)
    with zinf.initialize(
        square, wide, None, config(kind, **many), batch=rows
    ) as engine:
        engine.restore(tmp_path / "few")
        after = saved(engine, "many")
    own, averages, *others = zip(before, after, strict=True)
    for x, y in (own, *others):
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(y.mean(1), x.mean(1), rtol=1e-5, atol=1e-9)
    assert np.abs(averages[0]).max() > 0
    np.testing.assert_array_equal(averages[1].reshape(-1), averages[0].reshape(-1))


@pytest.mark.slow
def test_local_steps_of_0_1_adam_send_no_number_of_a_leaf():
    made = make_planner(square, wide, None, config("ZeroOneAdam")).plan_batch(batch())
    assert isinstance(made, Fused)
    local = made.program.of(Phase.LOCAL)
    # The losses and the norm, which metrics need.
    assert sum(x.sent_bytes for x in collectives_of(local)) < 64


def test_the_plan_says_what_goes_by_signs():
    for kind, said in (
        (
            "OneBitLamb",
            "After 8 updates, momenta of 1 leaves are averaged by their signs; as they "
            "are, 1 with one dim or few numbers (bias).",
        ),
        ("ZeroOneAdam", "after 8 updates devices take steps of their own"),
    ):
        made = make_planner(square, wide, None, config(kind)).plan_batch(batch())
        assert made.plan.is_fused
        assert said in made.plan.why


@pytest.mark.parametrize("kind", [*OF_CONFIG, None])
def test_what_signs_cannot_be_with_is_refused(kind):
    tx = in_python() if kind is None else None
    for more, said in (
        ({"zero_optimization": {"stage": 2}}, "stage is 2. Set it to"),
        ({"gradient_clipping": 1.0}, "by its own norm"),
        ({"execution": "streamed"}, "in fused steps"),
        ({"fp16": {"enabled": True}}, "Use bf16 alone"),
        ({"run": {"steps": FREEZE}}, "the run ends at step 8"),
        ({"mesh": {"fsdp": 4, "tensor": 2}}, "mesh.tensor = 2"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=said):
            make_planner(square, wide, tx, config(kind, **more))
