"""An average of the weights is that of its formula on every tier, and is evaluated.

Reading it changes no weight, and takes no more room than the plan of the evaluation.
"""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.models import PYTREE
from tests.equivalence.training import (
    BOUND,
    FUSED,
    OFFLOADED,
    ON_DEVICE,
    ON_HOST,
    ON_NVME,
    Setting,
    mesh_of,
)
from tests.tiers import streamed
from zinf.core.optim.average import with_ema
from zinf.core.plan import InfeasibleError
from zinf.core.program import Tier
from zinf.core.segment import named_leaves
from zinf.core.step.run.forward import ForwardRunner

slow = pytest.mark.slow
DECAY, AFTER, STEPS = 0.75, 1, 4
TX = optax.chain(optax.adamw(1e-2), zinf.with_ema(DECAY, update_after=AFTER))
# Each of the multiply-adds of an average may be rounded once or twice.
ROUNDING = 4 * STEPS * 2.0**-23
FIRST = Setting(ON_DEVICE)
SETTINGS = {
    "device": FIRST,
    "fused": Setting(FUSED),
    "offloaded": Setting(OFFLOADED),
    "host": Setting(ON_HOST),
    "nvme": Setting(ON_NVME),
    "nvme bf16 clipping": Setting(ON_NVME, "bf16 clipping"),
    "fused bf16": Setting(FUSED, "bf16"),
    "offloaded bf16": Setting(OFFLOADED, "bf16"),
    "host accumulation": Setting(ON_HOST, "accumulation"),
    # The last matrix is read by tile.
    "nvme tiles": Setting(ON_NVME, more=(("segment.max_bytes", 512),)),
    "stage 1": Setting(ON_HOST, mesh="2", stage=1),
    "stage 3": Setting(ON_NVME, "bf16", mesh="2"),
}
FAST = ("fused", "nvme", "offloaded bf16", "stage 1")


def averages(engine: zinf.Engine) -> Any:
    paths = named_leaves(PYTREE.init())
    found = [engine.get(path, "ema") for path in paths]
    return jax.tree.unflatten(jax.tree.structure(PYTREE.init()), found)


def formula(trained: list[Any]) -> Any:
    """The average, given the weights at the start and after each update."""
    average = trained[0]
    for t, weights in enumerate(trained[1:]):
        d = 0.0 if t < AFTER else DECAY
        average = jax.tree.map(
            lambda a, w, d=d: np.float32(d) * a + np.float32(1 - d) * w,
            average,
            weights,
        )
    return average


def train(setting: Setting, folder: str) -> tuple[Any, float]:
    """The average after some steps, and its loss on another batch."""
    config = setting.config(PYTREE, folder)
    *given, held_out = PYTREE.batches(STEPS + 1, setting.num_microbatches)
    with PYTREE.start(TX, config, mesh=mesh_of(setting.mesh)) as engine:
        trained = [jax.tree.map(np.asarray, PYTREE.init())]
        for batch in given:
            engine.step(batch)
            trained.append(engine.params())
        average = averages(engine)
        chex.assert_trees_all_close(average, formula(trained), rtol=ROUNDING, atol=1e-7)
        plain = engine.evaluate(held_out)
        found = engine.evaluate(held_out, kind="ema")
        dtype = jnp.dtype(engine.config.compute_dtype)
        rounded = jax.tree.map(lambda x: jnp.asarray(x, dtype), average)
        expected = float(jax.jit(PYTREE.loss)(rounded, held_out))
        # Of bfloat16, other fusions round other intermediate values.
        bound = BOUND if dtype == np.float32 else 2.0**-7
        np.testing.assert_allclose(found, expected, rtol=bound)
        assert abs(plain - found) > 1e-3 * plain
        # Nothing was changed, and nothing is left of the evaluation.
        chex.assert_trees_all_equal(engine.params(), trained[-1], strict=True)
        assert engine.evaluate(held_out) == plain
        used = {t: engine.stores[t].ledger.used_bytes for t in engine.stores.tiers}
        assert used == {t: engine.plan.home_bytes[t] for t in used}
        assert engine.evaluate(held_out, kind="ema") == found
    return average, found


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in FAST else slow) for x in SETTINGS]
)
def test_the_average_is_that_of_its_formula_and_is_evaluated(name, tmp_path):
    train(SETTINGS[name], str(tmp_path))


def test_tiers_change_no_bit_of_an_average_or_of_its_loss(tmp_path):
    found = [
        train(Setting(place, "bf16"), str(tmp_path / str(number)))
        for number, place in enumerate((ON_DEVICE, ON_NVME))
    ]
    chex.assert_trees_all_equal(*found, strict=True)


def test_an_average_survives_a_restore(tmp_path):
    *given, held_out = PYTREE.batches(3)
    found = []
    for number in range(2):
        config = Setting(ON_NVME).config(PYTREE, str(tmp_path / f"nvme {number}"))
        with PYTREE.start(TX, config) as engine:
            if number == 0:
                for batch in given:
                    engine.step(batch)
                engine.save(tmp_path / "saved")
            else:
                engine.restore(tmp_path / "saved")
                engine.prepare(held_out)
            found.append((averages(engine), engine.evaluate(held_out, kind="ema")))
    chex.assert_trees_all_equal(*found, strict=True)


def test_averages_larger_than_the_device_are_evaluated_within_its_budget(tmp_path):
    """Neither does the device ever hold all of them, nor the host."""
    layers, dim = 16, 64

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x))

    def init() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), layers)
        return [jax.random.normal(key, (dim, dim)) / dim for key in keys]

    nbytes = 4 * layers * dim * dim
    config = streamed("nvme", tmp_path, persistence_threshold=0)
    config["memory"] |= {"device": nbytes // 2, "host": nbytes}
    batch = {"x": np.ones((2, dim), np.float32)}
    with zinf.initialize(loss, init, TX, config, batch=batch) as engine:
        engine.step(batch)
        engine.flush()
        engine.stores.reset_peaks()
        found = engine.evaluate(batch, kind="ema")
        peaks = {tier: engine.stores.peak_bytes(tier) for tier in engine.stores.tiers}
        average = [engine.get(str(i), "ema") for i in range(layers)]
    assert peaks[Tier.DEVICE] <= nbytes // 2
    assert peaks[Tier.HOST] <= nbytes
    np.testing.assert_allclose(found, float(loss(average, batch)), rtol=BOUND)


SGD = optax.sgd(0.1)
START = partial(PYTREE.start, config={"execution": "fused"})


def test_what_has_no_average_is_refused_or_read_as_it_is():
    (batch,) = PYTREE.batches(1)
    with START(SGD) as engine, pytest.raises(ValueError, match="with_ema"):
        engine.evaluate(batch, kind="ema")
    # optax.ema averages updates.
    with START(optax.chain(optax.ema(0.9), SGD)) as engine:
        engine.prepare(batch)
        assert engine.get("out", "ema").shape == (16, 16)
        with pytest.raises(ValueError, match="It has none"):
            engine.evaluate(batch, kind="ema")
    twice = optax.chain(SGD, zinf.with_ema(0.5), zinf.with_ema(0.9))
    with START(twice) as engine:
        with pytest.raises(ValueError, match="'1/ema', '2/ema'"):
            engine.evaluate(batch, kind="ema")
        losses = {engine.evaluate(batch, kind=kind) for kind in ("1/ema", "2/ema")}
        assert len(losses) == 1  # Both begin as the weights.
    mask = {"layers": False, "out": True, "temperature": False}
    part = optax.chain(SGD, optax.masked(zinf.with_ema(0.5), mask))
    with PYTREE.start(part, {"frozen": ["temperature"]}) as engine:
        engine.step(batch)
        weights = engine.params()
        weights["out"] = engine.get("out", "ema")
        found = engine.evaluate(batch, kind="ema")
        np.testing.assert_allclose(found, PYTREE.loss(weights, batch), rtol=BOUND)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"decay": 1.0}, "below 1"), ({"decay": 0.5, "update_after": -1}, "negative")],
)
def test_an_average_that_cannot_be_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        with_ema(**arguments)


def test_an_average_needs_the_weights():
    tx = with_ema(0.5)
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))


def test_an_evaluation_without_room_names_the_budget(tmp_path, monkeypatch):
    """Averages are float32: a device may have room for bfloat16 weights alone."""
    (batch,) = PYTREE.batches(1)
    needed, made, init = {}, [], ForwardRunner.__init__

    def noted(self, forward, *rest):
        made.append(forward)
        init(self, forward, *rest)

    monkeypatch.setattr(ForwardRunner, "__init__", noted)
    for kind in ("master", "ema"):
        config = Setting(ON_HOST, "bf16").config(PYTREE, str(tmp_path))
        with PYTREE.start(TX, config, batch=batch) as engine:
            engine.prepare_evaluation(batch, kind=kind)
            needed[kind] = made[-1].plan.peak_bytes[Tier.DEVICE]
    assert needed["ema"] > needed["master"]
    with pytest.raises(InfeasibleError, match="memory.device"):
        config["memory"] = {"device": needed["master"] // 2}
        with PYTREE.start(TX, config, batch=batch) as engine:
            engine.prepare_evaluation(batch, kind="ema")
