"""What `engine.apply` returns does not depend on where arrays rest."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf
from zinf.models import GPT, GPTConfig, next_token_loss

SHAPE = {"num_layers": 3, "num_heads": 2, "embed_dim": 16, "max_length": 8}
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


def initialize(settings, *, scan=False):
    shape = GPTConfig(**SHAPE, vocab_size=32, scan_layers=scan)
    create = lambda: GPT(shape, rngs=nnx.Rngs(0))  # noqa: E731
    tx = optax.adamw(1e-2)
    engine = zinf.nnx.initialize(next_token_loss, create, tx, settings)
    engine.prepare(draw(0, 4))
    return engine


def draw(seed, size):
    random = np.random.default_rng(seed)
    return {"tokens": random.integers(0, 32, (size, 9), np.int32)}


def outputs(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return {"logits": logits, "scores": scores[..., 0], "best": logits.argmax(-1)}


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_outputs_are_bit_equal_on_all_tiers(tmp_path, scan):
    with initialize({"execution": "fused"}, scan=scan) as engine:
        assert engine.plan.is_fused
        initial = engine.apply(outputs, draw(1, 6))
        expected = outputs(engine.update_module(), draw(1, 6))
        # The order of float32 additions differs: a few units in the last place.
        chex.assert_trees_all_close(initial, jax.device_get(expected), atol=1e-5)
    trained, parts = [], []
    for tier in TIERS:
        with initialize(config(tier, tmp_path / tier), scan=scan) as engine:
            found = engine.apply(outputs, draw(1, 6))
            chex.assert_trees_all_equal(found, initial, strict=True)
            engine.step(draw(0, 4))
            trained.append(engine.apply(outputs, draw(1, 6)))
            parts.append(engine.apply(outputs, draw(1, 6), num_microbatches=3))
    for found in (trained, parts):
        chex.assert_trees_all_equal(*found, strict=True)
    assert not np.array_equal(trained[0]["logits"], initial["logits"])


def test_outputs_of_a_mesh_are_whole_and_bit_equal_on_its_tiers(tmp_path):
    with initialize(config("cpu", tmp_path / "one")) as engine:
        expected = engine.apply(outputs, draw(1, 8))
    found = []
    for tier in TIERS[1:]:
        settings = config(tier, tmp_path / tier, mesh={"fsdp": 4})
        with initialize(settings) as engine:
            found.append(engine.apply(outputs, draw(1, 8)))
    chex.assert_trees_all_equal(*found, strict=True)
    # Each device multiplies other shapes: a few units in the last place.
    chex.assert_trees_all_close(found[0], expected, atol=1e-5)


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
