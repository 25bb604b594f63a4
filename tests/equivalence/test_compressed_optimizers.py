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
        found["optimizer"] = {"type": kind, "params": OF_CONFIG.get(kind, {})}
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


def random_rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {"x": random.standard_normal((ROWS, WIDE), np.float32)}


def saved(engine: zinf.Engine, folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the large leaf, by what files call them."""
    engine.save(folder)
    with Saved(folder) as found:
        return {a.kind: found.read(a) for a in found.arrays if a.path == "w"}


def trained(
    kind: str, count: int, folder: Path, steps: int, restored: Path | None = None
) -> dict[str, np.ndarray]:
    """What so many devices save after some steps, of what others saved."""
    rows, settings = random_rows(), config(kind, mesh={"fsdp": count})
    if kind == "ZeroOneAdam":
        # Gradients go by signs from the second update on.
        early = {"var_update_scaler": 1}
        settings["optimizer"]["params"] = OF_CONFIG[kind] | early
    with zinf.initialize(square, wide, None, settings, batch=rows) as engine:
        if restored is not None:
            engine.restore(restored)
        for _ in range(steps):
            engine.step(rows)
        return saved(engine, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "there", "here"),
    [("OneBitLamb", 2, 8), ("ZeroOneAdam", 2, 4), ("OneBitAdam", 4, 2)],
)
def test_what_signs_lost_goes_over_to_another_number_of_devices(
    kind, there, here, tmp_path
):
    before = trained(kind, there, tmp_path / "there", FREEZE + 4)
    after = trained(kind, here, tmp_path / "here", 0, tmp_path / "there")
    for name in (name for name in before if name.startswith("error")):
        x, y = before[name], after[name]
        assert np.abs(x).max() > 0
        if name == "error1":
            np.testing.assert_array_equal(y.reshape(-1), x.reshape(-1))
        else:
            np.testing.assert_allclose(y.mean(1), x.mean(1), rtol=1e-5, atol=1e-9)
    trained(kind, here, tmp_path / "later", 1, tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps"),
    [("OneBitAdam", FREEZE + 4), ("ZeroOneAdam", 3), ("ZeroOneAdam", FREEZE + 4)],
)
def test_one_device_adds_what_signs_lost_and_several_go_on_from_it(
    kind, steps, tmp_path
):
    before = trained(kind, 2, tmp_path / "two", steps)
    after = trained(kind, 1, tmp_path / "one", 0, tmp_path / "two")
    own, averages = before["error0"].mean(1), before["error1"]
    lost = (own.reshape(-1) + averages.reshape(-1)).reshape(WIDE, WIDE)
    assert np.abs(lost).max() > 0
    master = after["param"] - before["param"]
    if steps > FREEZE and kind == "ZeroOneAdam":
        root = np.sqrt(before["state1"]) + 1e-8
        expected = before["error2"][0].mean(0) + lost / root
        np.testing.assert_allclose(master, expected, atol=1e-6)
        momentum = before["error3"][0].mean(0)
        np.testing.assert_allclose(after["state0"], momentum, rtol=1e-6)
    else:
        # The next momentum, 0.9 m + 0.1 g, has the errors of momenta or of gradients.
        carried = 0.9 * (after["state0"] - before["state0"])
        share = 0.1 if kind == "ZeroOneAdam" else 1
        np.testing.assert_allclose(carried, share * lost, rtol=1e-3, atol=1e-7)
        assert not master.any()
    again = trained(kind, 2, tmp_path / "again", 0, tmp_path / "one")
    for name in ("param", "state0", "state1"):
        np.testing.assert_array_equal(again[name], after[name])
    own_momenta = again.pop("error3", None)
    assert not any(x.any() for name, x in again.items() if name.startswith("error"))
    if own_momenta is not None:
        np.testing.assert_array_equal(own_momenta[0], [after["state0"]] * 2)
    trained(kind, 2, tmp_path / "later", 1, tmp_path / "again")


def test_plain_adam_goes_on_by_signs_and_the_log_says_what_is_absent(tmp_path, caplog):
    """Arrays and counts stay; errors begin at zero, after the warm-up as within it."""
    rows, after = random_rows(), {}
    for kind in ("Adam", "OneBitAdam"):
        settings = config(kind, mesh={"fsdp": 2})
        with zinf.initialize(square, wide, None, settings, batch=rows) as engine:
            if after:
                engine.restore(tmp_path / "Adam")
                assert engine.num_steps == FREEZE + 2
            else:
                for _ in range(FREEZE + 2):
                    engine.step(rows)
            after[kind] = saved(engine, tmp_path / kind)
            engine.step(rows)
    errors = {n: after["OneBitAdam"].pop(n) for n in ("error0", "error1")}
    assert not any(x.any() for x in errors.values())
    jax.tree.map(np.testing.assert_array_equal, after["OneBitAdam"], after["Adam"])
    assert "has no errors of what devices send by signs" in caplog.text
    assert "1 leaves begin at zero" in caplog.text


def test_local_steps_decay_weights_of_no_variance_and_may_have_a_rate_of_zero():
    """The first row of weights has no gradient; from step 9 on the rate is zero."""
    rows, decay, width = random_rows()["x"][:, :16], 0.1, 16
    rows[:, 0] = 0
    settings = config("ZeroOneAdam", mesh={"fsdp": 2})
    settings["optimizer"]["params"] = {
        "weight_decay": decay,
        "var_freeze_step": 4,
        "var_update_scaler": 1,
        "local_step_scaler": 2,
        "local_step_clipper": 2,
    }
    rates = {"warmup_max_lr": 1e-4, "warmup_num_steps": 1, "total_num_steps": 8}
    settings["scheduler"] = {"type": "WarmupDecayLR", "params": rates}
    params = {"bias": jnp.ones(width), "w": jnp.ones((width, width))}
    with zinf.initialize(square, params, None, settings) as engine:
        taken = [engine.step({"x": rows})["learning_rate"] for _ in range(12)]
        last = engine.params()["w"]
        assert taken[-3:] == [0, 0, 0]
        assert np.abs(engine.get("w", "mu")[1:]).min() > 0
        assert not engine.get("w", "mu")[0].any()
    np.testing.assert_allclose(last[0], np.prod(1 - decay * np.array(taken)), rtol=1e-6)
    assert np.isfinite(last).all()


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
