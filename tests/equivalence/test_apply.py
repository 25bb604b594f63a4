"""What `engine.apply` returns does not depend on where arrays rest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.models import NNX, PYTREE, Model
from tests.equivalence.training import (
    FUSED,
    ON_DEVICE,
    ON_HOST,
    ON_NVME,
    OPTIMIZERS,
    Setting,
    mesh_of,
)

PLACES = (ON_DEVICE, ON_HOST, ON_NVME)


def layer_outputs(params: Any, batch: Any) -> Any:
    """Of a stack of layers: each layer's output, and integers."""
    x, hidden = batch["x"], []
    layers = params["layers"]
    for w, b in zip(layers["w"], layers["b"], strict=True):
        x = x + jnp.tanh(x @ w + b[None])
        hidden.append(x)
    return {"logits": x @ params["out"], "hidden": hidden, "best": x.argmax(-1)}


def scores(module: Any, batch: Any) -> Any:
    """Of a module: logits, the log-probability of each token, and integers."""
    tokens = batch["tokens"]
    logits = module(tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2)
    return {"logits": logits, "scores": chosen[..., 0], "best": logits.argmax(-1)}


@dataclass(frozen=True)
class Applied:
    model: Model
    outputs: Callable[[Any, Any], Any]

    def start(self, folder: Path, place: Any, mesh: str = "1") -> zinf.Engine:
        model, setting = self.model, Setting(place, mesh=mesh)
        config = setting.config(model, str(folder)) | {"persistence_threshold": 1}
        return model.start(OPTIMIZERS["adam"], config, mesh=mesh_of(mesh))


LAYERS = Applied(PYTREE, layer_outputs)
MODULE = Applied(NNX, scores)


@pytest.mark.parametrize(
    "applied", [LAYERS, pytest.param(MODULE, marks=pytest.mark.slow)]
)
def test_outputs_are_bit_equal_on_all_tiers(tmp_path, applied):
    (given,) = applied.model.batches(1)
    six = applied.model.draw(np.random.default_rng(2), 6)
    with applied.start(tmp_path, FUSED) as engine:
        engine.prepare(given)
        assert engine.plan.is_fused
        initial = engine.apply(applied.outputs, six)
    trained, parts = [], []
    for number, place in enumerate(PLACES):
        with applied.start(tmp_path / str(number), place) as engine:
            engine.prepare(given)
            found = engine.apply(applied.outputs, six)
            chex.assert_trees_all_equal(found, initial, strict=True)
            engine.step(given)
            trained.append(engine.apply(applied.outputs, six))
            parts.append(engine.apply(applied.outputs, six, num_microbatches=3))
    for found in (trained, parts):
        chex.assert_trees_all_equal(*found, strict=True)
    assert not np.array_equal(trained[0]["logits"], initial["logits"])


def test_outputs_of_a_mesh_are_whole_and_bit_equal_on_its_tiers(tmp_path):
    batch = PYTREE.draw(np.random.default_rng(2), 8)
    found = []
    for place in (ON_HOST, ON_NVME):
        with LAYERS.start(tmp_path, place, "4") as engine:
            engine.prepare(batch)
            found.append(engine.apply(layer_outputs, batch))
    chex.assert_trees_all_equal(*found, strict=True)
    # Float32 is added up in another order: some units in the last place.
    expected = jax.device_get(layer_outputs(PYTREE.init(), batch))
    chex.assert_trees_all_close(found[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_layers_larger_than_the_device_are_applied_within_its_budget(tmp_path):
    def loss(params, batch):
        x = hidden(params, batch)
        return jnp.mean(jnp.square(x @ params["down"] - batch["x"]))

    def hidden(params, batch):
        return jnp.tanh(batch["x"] @ params["up"])

    random = np.random.default_rng(0)
    shapes = {"up": (64, 512), "down": (512, 64)}
    params = {k: random.standard_normal(s, np.float32) / 8 for k, s in shapes.items()}
    batch = {"x": random.standard_normal((4, 64), np.float32)}
    # Half of one of the two weights, which have 128 KiB each.
    config = Setting(ON_NVME).config(PYTREE, str(tmp_path))
    config |= {"persistence_threshold": 1}
    config["memory"] |= {"device": "64KiB"}
    start = loss, params, optax.sgd(0.1), config
    with zinf.initialize(*start, batch=batch) as engine:
        found = engine.apply(hidden, batch)
        peak = engine.stores.device.ledger.peak_bytes
    np.testing.assert_allclose(found, hidden(params, batch), rtol=1e-5, atol=1e-6)
    assert peak <= 64 * 1024
