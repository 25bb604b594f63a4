"""Weights that are read by tile train as whole ones do."""

from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.models import NNX, PYTREE, Model
from tests.equivalence.training import OPTIMIZERS, SETTINGS, streamed_config
from tests.marks import slow_except
from zinf.engine import Engine
from zinf.executor.streamed import StreamedRunner
from zinf.program import Program

STEPS = 3
MAX_BYTES = 512


def running_program(engine: Engine) -> Program:
    """The segments of the step that an engine takes, streamed."""
    assert isinstance(engine._current, StreamedRunner)
    return engine._current.passes.program


def train(
    model: Model, folder: Any, setting: str, **config: Any
) -> tuple[list[float], int, Any]:
    """`(losses, number of tiled leaves, parameters)`."""
    settings = SETTINGS[setting]
    whole = streamed_config(("nvme", "nvme"), str(folder)) | settings | config
    whole["segment"] = {"remat": "always"} | config.get("segment", {})
    engine = model.start(OPTIMIZERS["sgd"], whole)
    number = settings.get("gradient_accumulation_steps", 1)
    batches = model.batches(STEPS, number)
    losses = [engine.step(batch)["loss"] for batch in batches]
    num_tiled = len(running_program(engine).tilings)
    params = engine.params()
    engine.close()
    return losses, num_tiled, params


@pytest.mark.slow
def test_tiled_weights_train_as_whole_ones(tmp_path):
    segment = {"max_bytes": MAX_BYTES}
    expected, none, _ = train(PYTREE, tmp_path / "whole", "plain")
    losses, num_tiled, params = train(PYTREE, tmp_path / "a", "plain", segment=segment)
    assert none == 0 and num_tiled > 0
    # Sums over tiles are in another order: the bound of the streamed step against
    # plain JAX (test_reference), which fusions alone need.
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["accumulation and clipping", "bf16 accumulation"])
def test_tiles_are_accumulated_clipped_and_cast_as_wholes_are(setting, tmp_path):
    # The fewer tiles, the less there is to compile; in bfloat16 weights take half the
    # room.
    segment = {"max_bytes": MAX_BYTES if "bf16" in setting else 2 * MAX_BYTES}
    expected, _, _ = train(NNX, tmp_path / "whole", setting)
    losses, num_tiled, _ = train(NNX, tmp_path / "a", setting, segment=segment)
    assert num_tiled > 1
    # A bfloat16 activation that is rounded the other way is off by 2^-8.
    np.testing.assert_allclose(
        losses, expected, rtol=4e-3 if "bf16" in setting else 1e-5
    )


@pytest.mark.parametrize(
    "placement",
    [("cpu", "nvme"), pytest.param(("none", "cpu"), marks=pytest.mark.slow)],
)
def test_where_tiles_rest_changes_no_bit(placement, tmp_path):
    segment = {"max_bytes": MAX_BYTES}
    expected, _, params = train(PYTREE, tmp_path / "a", "plain", segment=segment)
    moved = streamed_config(placement, str(tmp_path / "b"))["zero_optimization"]
    losses, _, there = train(
        PYTREE, tmp_path / "b", "plain", segment=segment, zero_optimization=moved
    )
    assert losses == expected
    chex.assert_trees_all_equal(there, params, strict=True)


def layer_loss(params: Any, batch: Any) -> jax.Array:
    y = batch["x"] @ params["kernel"] + params["bias"][None]
    return jax.numpy.mean((y - batch["y"]) ** 2)


def layer(
    hidden: int, budget: int, folder: Any, host: int | None = None, **config: Any
) -> Any:
    """An engine for one layer of `hidden` x 4 `hidden`, and a batch."""
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(4, n)).astype("f4") for n in (hidden, 4 * hidden))
    whole = streamed_config(("nvme", "nvme"), str(folder)) | config
    whole["memory"] |= {"device": budget} | ({"host": host} if host else {})
    init = {"kernel": x.T @ y / 99, "bias": np.zeros(4 * hidden, "f4")}
    engine = zinf.initialize(layer_loss, init, optax.adam(1e-3), whole)
    return engine, {"x": x, "y": y}


def test_a_layer_larger_than_the_device_trains_within_its_budget(tmp_path):
    """The weight alone is four times the budget, and nobody said so anywhere."""
    hidden = 256
    budget = hidden * 4 * hidden * 4 // 4
    losses = []
    for number, nbytes in enumerate((32 * budget, budget)):
        engine, batch = layer(hidden, nbytes, tmp_path / str(number))
        metrics = [engine.step(batch) for _ in range(3)]
        assert all(m["device_bytes"] <= nbytes for m in metrics)
        losses.append([m["loss"] for m in metrics])
        engine.close()
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_tiles_are_as_small_as_their_updates_on_the_host_need(tmp_path):
    """A tile that just fits the device takes four times as much of the host."""
    hidden = 256
    budget = hidden * 4 * hidden * 4 // 4
    engine, batch = layer(hidden, 32 * budget, tmp_path / "whole")
    expected = [engine.step(batch)["loss"] for _ in range(3)]
    engine.close()
    engine, batch = layer(hidden, budget, tmp_path / "tiles", host=budget)
    metrics = [engine.step(batch) for _ in range(3)]
    assert all(m["device_bytes"] <= budget for m in metrics)
    assert all(m["host_bytes"] <= budget for m in metrics)
    np.testing.assert_allclose([m["loss"] for m in metrics], expected, rtol=1e-5)
    engine.close()


def test_a_weight_that_cannot_be_tiled_is_named_when_it_does_not_fit(tmp_path):
    def loss(params: Any, batch: Any) -> jax.Array:
        return (batch @ params["kernel"]).sum() / jax.numpy.linalg.norm(
            params["kernel"]
        )

    init = {"kernel": np.ones((256, 256), "f4")}
    config = streamed_config(("nvme", "nvme"), str(tmp_path))
    config["memory"] |= {"device": 128 * 1024}
    with pytest.raises(ValueError, match=r"kernel.*`(square|reduce_sum|mul)`"):
        zinf.initialize(
            loss, init, optax.adam(1e-3), config, batch=np.ones((2, 256), "f4")
        )


def language_loss(params: Any, batch: Any) -> jax.Array:
    x = params["table"][batch["tokens"]]
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    logits = x @ params["table"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    mask = (batch["tokens"] > 3).astype(np.float32)
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize("num_microbatches", slow_except([2], [1, 2]))
def test_intermediate_values_larger_than_the_device_exist_a_block_at_a_time(
    num_microbatches, tmp_path
):
    """Logits of 2 MiB and hidden layers of 512 KiB, on a device of 1 MiB."""
    vocab, dim, length = 1024, 16, 512
    random = np.random.default_rng(0)
    shapes = {"table": (vocab, dim), "up": (dim, 256), "down": (256, dim)}
    init = {k: random.normal(size=s).astype("f4") / 8 for k, s in shapes.items()}
    size = (num_microbatches, length)
    batches = [
        {
            name: random.integers(0, vocab, size, np.int32)
            for name in ("tokens", "labels")
        }
        for _ in range(3)
    ]
    runs = []
    for budget in (64 << 20, 1 << 20):
        config = streamed_config(("cpu", "cpu"), str(tmp_path))
        config["memory"] = {"device": budget}
        config["gradient_accumulation_steps"] = num_microbatches
        engine = zinf.initialize(language_loss, init, optax.sgd(1.0), config)
        metrics = [engine.step(batch) for batch in batches]
        assert all(m["device_bytes"] <= budget for m in metrics)
        counts = [s.row_blocks for s in running_program(engine).segments]
        losses = [m["loss"] for m in metrics] + [engine.evaluate(batches[0])]
        runs.append((max(counts), losses, engine.params()))
        engine.close()
    (whole, expected, params), (blocks, losses, there) = runs
    assert whole == 1 and blocks >= 4
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path, leaf in params.items():
        largest = np.abs(leaf).max()
        np.testing.assert_allclose(there[path], leaf, rtol=0, atol=1e-5 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2])
def test_tiles_and_blocks_of_rows_are_the_same_on_a_mesh(num_devices, tmp_path):
    """Tiles are gathered by tile, and rows that devices divide stay where they are."""
    vocab, dim, length = 512, 16, 64
    random = np.random.default_rng(0)
    shapes = {"table": (vocab, dim), "up": (dim, 256), "down": (256, dim)}
    init = {k: random.normal(size=s).astype("f4") / 8 for k, s in shapes.items()}
    batch = {
        name: random.integers(0, vocab, (4, length), np.int32)
        for name in ("tokens", "labels")
    }
    runs = []
    for count, budget in ((1, 64 << 20), (num_devices, (1 << 20) // num_devices)):
        config = streamed_config(("cpu", "cpu"), str(tmp_path))
        config |= {"memory": {"device": budget}, "persistence_threshold": 64}
        mesh = zinf.make_mesh(jax.devices()[:count])
        engine = zinf.initialize(language_loss, init, optax.sgd(1.0), config, mesh=mesh)
        metrics = [engine.step(batch) for _ in range(3)]
        assert all(m["device_bytes"] <= budget for m in metrics)
        blocks = max(s.row_blocks for s in running_program(engine).segments)
        runs.append((blocks, [m["loss"] for m in metrics]))
        engine.close()
    (whole, expected), (blocks, losses) = runs
    assert whole == 1 and blocks > 1
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
def test_tiles_train_on_a_mesh_as_whole_weights_do(tmp_path):
    losses = []
    for number, segment in enumerate(({}, {"max_bytes": 4 * MAX_BYTES})):
        config = streamed_config(("nvme", "nvme"), str(tmp_path / str(number)))
        config |= {"segment": {"remat": "always"} | segment}
        config |= {"persistence_threshold": 64}
        random = np.random.default_rng(0)
        shapes = {"table": (64, 16), "up": (16, 64), "down": (64, 16)}
        init = {k: random.normal(size=s).astype("f4") / 4 for k, s in shapes.items()}
        mesh = zinf.make_mesh(jax.devices()[:4])
        engine = zinf.initialize(
            language_loss, init, optax.adam(1e-2), config, mesh=mesh
        )
        names = ("tokens", "labels")
        batch = {name: random.integers(0, 64, (4, 8), np.int32) for name in names}
        losses.append([engine.step(batch)["loss"] for _ in range(3)])
        assert len(running_program(engine).tilings) == 3 * number
        engine.close()
    np.testing.assert_allclose(*losses, rtol=1e-5)
