"""Losses and gradients that are not finite change nothing."""

from itertools import pairwise

import chex
import jax
import numpy as np
import pytest

from tests.robustness.small import content, draw, expect_at_rest, on_nvme
from zinf.core.optim.decision import NonFiniteError

FUSED = {"execution": "fused"}
STREAMED = {"execution": "streamed"}
CLIPPED = {"gradient_clipping": 1.0}
# Gradients of a first loss scale of 2**40 overflow in fp16; 2**8 is enough for none to.
FP16 = {
    "fp16": {
        "enabled": True,
        "initial_scale_power": 40,
        "hysteresis": 1,
        "loss_scale_window": 100,
    }
}


def broken(value: float) -> dict[str, np.ndarray]:
    batch = draw()
    batch["x"][0, 0] = value
    return batch


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("config", ["fused", "clipped", "nvme", "nvme clipped"])
def test_a_loss_that_is_not_finite_changes_nothing(config, value, start, tmp_path):
    settings = CLIPPED if "clipped" in config else {}
    configs = [FUSED | settings] * 2
    if "nvme" in config:
        configs = [on_nvme(tmp_path / name, **settings) for name in ("a", "b")]
    engine, unharmed = (start(config, batch=draw()) for config in configs)
    engine.step(draw(1))
    unharmed.step(draw(1))
    before = content(engine)
    with pytest.raises(NonFiniteError, match="Nothing was updated") as caught:
        engine.step(broken(value))
    assert f"by microbatch: {value}" in str(caught.value)
    assert content(engine) == before
    assert engine.num_steps == 1
    expect_at_rest(engine)
    found, expected = engine.step(draw(2)), unharmed.step(draw(2))
    for name in ("step", "loss", "grad_norm", "skipped"):
        assert found[name] == expected[name]
    chex.assert_trees_all_equal(engine.params(), unharmed.params(), strict=True)


def test_a_gradient_that_is_not_finite_under_a_finite_loss_changes_nothing(start):
    def loss(params, batch):
        # The gradient of sqrt at 0 is inf, and 0 times that is nan.
        return ((params["out"] * batch["x"].mean()) ** 2).sum() + (
            0.0 * params["layers"][0]["b"] ** 0.5
        ).sum()

    for config in (FUSED, STREAMED | CLIPPED):
        engine = start(config, loss=loss, batch=draw())
        before = content(engine)
        with pytest.raises(NonFiniteError, match="gradient norm is nan"):
            engine.step(draw())
        assert content(engine) == before
        expect_at_rest(engine)


@pytest.mark.parametrize("config", ["fused", "offloaded", "nvme"])
def test_steps_that_are_not_finite_are_skipped_up_to_a_number_in_a_row(
    config, start, tmp_path
):
    """With bf16; one more is an error. A restored run goes on counting."""
    settings = {"bf16": {"enabled": True}, "skip_nonfinite": 2}
    asked = {"execution": config} | settings
    if config == "nvme":
        asked = on_nvme(tmp_path / "run", **settings)
    engine = start(asked, batch=draw())
    engine.step(draw(1))
    before, shared = content(engine), engine.scalars()["shared"]
    for count in (1, 2):
        metrics = engine.step(broken(np.nan))
        assert (metrics["skipped"], metrics["num_skipped"]) == (True, count)
        assert content(engine) == before
        assert engine.scalars()["shared"] == shared
    engine.save(tmp_path / "saved")
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="3 steps in a row, and skip_nonfin"):
            engine.step(broken(np.inf))
        assert (content(engine), engine.num_steps) == (before, 3)
        engine.restore(tmp_path / "saved")
    metrics = engine.step(draw(2))
    assert (metrics["skipped"], metrics["num_skipped"]) == (False, 2)
    # One that is finite begins a new row.
    assert engine.step(broken(np.nan))["num_skipped"] == 3
    assert content(engine) != before
    expect_at_rest(engine)


@pytest.mark.parametrize("settings", [{}, CLIPPED], ids=["free", "clipped"])
def test_large_gradients_are_no_overflow_though_their_squares_are(
    settings, start, tmp_path
):
    """Of 2e25, whose squares float32 does not hold: every placement updates all."""
    size = np.float32(2e25)

    def loss(params, batch):
        return (
            size * sum(x.sum() for x in jax.tree.leaves(params)) + 0 * batch["x"][0, 0]
        )

    configs = (FUSED, STREAMED, {"execution": "offloaded"}, on_nvme(tmp_path))
    params, norms = [], []
    for config in configs:
        engine = start(config | settings, loss=loss, batch=draw())
        norms.append(engine.step(draw())["grad_norm"])
        engine.step(draw())
        params.append(engine.params())
        expect_at_rest(engine)
    count = sum(x.size for x in jax.tree.leaves(params[0]))
    np.testing.assert_allclose(norms, float(size) * count**0.5, rtol=1e-6)
    assert norms[1] == norms[3]
    chex.assert_trees_all_equal(params[1], params[3], strict=True)
    chex.assert_trees_all_close(params[0], params[1], params[2], rtol=1e-6)


def test_an_overflow_spends_the_hysteresis_first_and_then_halves_the_loss_scale(start):
    config = FUSED | {"fp16": FP16["fp16"] | {"hysteresis": 3}}
    engine = start(config, batch=draw())
    before, shared = content(engine), engine.scalars()["shared"]
    scales = []
    for step in range(1, 6):
        metrics = engine.step(draw())
        assert metrics["skipped"]
        assert metrics["step"] == engine.num_steps == step
        assert np.isfinite(metrics["loss"])
        assert not np.isfinite(metrics["grad_norm"])
        scales.append(metrics["loss_scale"])
    assert scales == [2.0**40] * 3 + [2.0**39, 2.0**38]
    assert content(engine) == before
    assert engine.scalars()["shared"] == shared
    expect_at_rest(engine)


@pytest.mark.slow
def test_after_overflows_every_placement_trains_alike(tmp_path, start):
    host = STREAMED | {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    }
    configs = (STREAMED, host, on_nvme(tmp_path), FUSED)
    engines = [start(config | FP16, batch=draw()) for config in configs]
    runs = []
    for engine in engines:
        metrics, before = [], content(engine)
        for i in range(40):
            metrics.append(engine.step(draw(i)))
            if all(m["skipped"] for m in metrics):
                assert content(engine) == before
                expect_at_rest(engine)
        trained = [m for m in metrics if not m["skipped"]]
        assert len(trained) >= 8
        assert trained[0]["step"] > 1
        for earlier, later in pairwise(metrics):
            halved = earlier["loss_scale"] / (2 if earlier["skipped"] else 1)
            assert later["loss_scale"] == halved
        assert engine.scalars()["shared"][0]["value"] == len(trained)
        runs.append([(m["loss"], m["skipped"]) for m in metrics])
    assert runs[0] == runs[1] == runs[2]
    # fp16 keeps 11 bits; the fused step rounds elsewhere.
    losses = [[loss for loss, _ in run] for run in (runs[0], runs[3])]
    np.testing.assert_allclose(*losses, rtol=2e-2)
    chex.assert_trees_all_equal(engines[0].params(), engines[2].params(), strict=True)
