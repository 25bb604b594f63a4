"""What `engine.apply` returns does not depend on where arrays rest."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from tests.robustness import small
from zinf.models import GPT, GPTConfig, next_token_loss

TIERS = ("none", "cpu", "nvme")


def config(tier, folder, **settings):
    return {
        "execution": "streamed",
        "segment": {"remat": "always"},
        "memory": {"nvme": [str(folder)]},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": tier},
            "offload_optimizer": {"device": tier},
        },
        "persistence_threshold": 1,
        **settings,
    }


class Layers:
    """Two layers, as a dict of arrays."""

    draw = staticmethod(small.draw)

    @staticmethod
    def initialize(settings: dict[str, Any]) -> zinf.Engine:
        tx = optax.adam(1e-2)
        return zinf.initialize(small.loss_fn, small.init, tx, settings)

    @staticmethod
    def outputs(params: Any, batch: Any) -> Any:
        x, hidden = batch["x"], []
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"][None])
            hidden.append(x)
        return {"logits": x @ params["out"], "hidden": hidden, "best": x.argmax(-1)}


class Transformer:
    """A module with a table that is read at both ends."""

    is_stacked = False

    @classmethod
    def initialize(cls, settings: dict[str, Any]) -> zinf.Engine:
        shape = GPTConfig(
            num_layers=3,
            num_heads=2,
            embed_dim=16,
            max_length=8,
            vocab_size=32,
            scan_layers=cls.is_stacked,
        )
        create: Callable = lambda: GPT(shape, rngs=nnx.Rngs(0))  # noqa: E731
        tx = optax.adamw(1e-2)
        return zinf.nnx.initialize(next_token_loss, create, tx, settings)

    @staticmethod
    def draw(seed: int, size: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed)
        return {"tokens": random.integers(0, 32, (size, 9), np.int32)}

    @staticmethod
    def outputs(module: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        logits = module(tokens[:, :-1])
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2)
        return {"logits": logits, "scores": scores[..., 0], "best": logits.argmax(-1)}


class Stacked(Transformer):
    """Its layers rest by row."""

    is_stacked = True


MODELS = [
    Layers,
    pytest.param(Transformer, marks=pytest.mark.slow),
    pytest.param(Stacked, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("model", MODELS)
def test_outputs_are_bit_equal_on_all_tiers(tmp_path, model):
    outputs, batch = model.outputs, model.draw(1, 6)
    with model.initialize({"execution": "fused"}) as engine:
        engine.prepare(model.draw(0, 4))
        assert engine.plan.is_fused
        initial = engine.apply(outputs, batch)
    trained, parts = [], []
    for tier in TIERS:
        with model.initialize(config(tier, tmp_path / tier)) as engine:
            engine.prepare(model.draw(0, 4))
            found = engine.apply(outputs, batch)
            chex.assert_trees_all_equal(found, initial, strict=True)
            engine.step(model.draw(0, 4))
            trained.append(engine.apply(outputs, batch))
            parts.append(engine.apply(outputs, batch, num_microbatches=3))
    for found in (trained, parts):
        chex.assert_trees_all_equal(*found, strict=True)
    assert not np.array_equal(trained[0]["logits"], initial["logits"])


def test_outputs_of_a_mesh_are_whole_and_bit_equal_on_its_tiers(tmp_path):
    found, batch = [], small.draw(1, 8)
    for tier in TIERS[1:]:
        settings = config(tier, tmp_path / tier, mesh={"fsdp": 4})
        with Layers.initialize(settings) as engine:
            engine.prepare(batch)
            found.append(engine.apply(Layers.outputs, batch))
    chex.assert_trees_all_equal(*found, strict=True)
    # Float32 is added up in another order: some units in the last place.
    expected = jax.device_get(Layers.outputs(small.init(), batch))
    chex.assert_trees_all_close(found[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_layers_larger_than_the_device_are_applied_within_its_budget(tmp_path):
    def loss(params, batch):
        x = jnp.tanh(batch["x"] @ params["up"])
        return jnp.mean(jnp.square(x @ params["down"] - batch["x"]))

    def hidden(params, batch):
        return jnp.tanh(batch["x"] @ params["up"])

    keys = jax.random.split(jax.random.key(0))
    shapes = {"up": (64, 512), "down": (512, 64)}
    params = {
        name: 0.1 * jax.random.normal(key, shape)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    batch = {"x": np.random.default_rng(0).standard_normal((4, 64), np.float32)}
    settings = config("nvme", tmp_path)
    # Half of one of the two weights, which have 128 KiB each.
    settings["memory"] = settings["memory"] | {"device": "64KiB"}
    tx = optax.sgd(0.1)
    with zinf.initialize(loss, params, tx, settings, batch=batch) as engine:
        found = engine.apply(hidden, batch)
        peak = engine.stores.device.ledger.peak_bytes
        np.testing.assert_allclose(found, hidden(params, batch), rtol=1e-5, atol=1e-6)
        assert peak <= 64 * 1024
