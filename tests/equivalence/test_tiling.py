"""Weights that are read by tile train as whole ones do."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.models import NNX, PYTREE, Model
from tests.equivalence.training import (
    BOTH,
    ON_HOST,
    ON_NVME,
    OPTIMIZERS,
    Run,
    Setting,
    assert_bit_equal,
    run_of,
    streamed_config,
)
from zinf.core.engine.engine import Engine
from zinf.core.program import Program
from zinf.core.step.run.streamed import StreamedRunner

MAX_BYTES = 512
STEPS = 3
slow = pytest.mark.slow


def running_program(engine: Engine) -> Program:
    """The segments of the step that an engine takes, streamed."""
    assert isinstance(engine._runners.current, StreamedRunner)
    return engine._runners.current.passes.program


def train(
    model: Model,
    folder: Path,
    name: str = "plain",
    place: Any = ON_NVME,
    **segment: Any,
) -> tuple[Run, int]:
    """A run, and the number of leaves that it reads by tile."""
    setting = Setting(place, name)
    config = setting.config(model, str(folder))
    config["segment"] = {"remat": "always"} | segment
    with model.start(OPTIMIZERS["sgd"], config) as engine:
        batches = model.batches(STEPS, setting.num_microbatches)
        metrics = [engine.step(batch) for batch in batches]
        return run_of(metrics, engine.params()), len(running_program(engine).tilings)


@slow
@pytest.mark.parametrize(
    ("model", "name", "max_bytes"),
    [
        (PYTREE, "plain", MAX_BYTES),
        # The fewer tiles, the less there is to compile; in bfloat16 weights take half
        # the room.
        (NNX, BOTH, 2 * MAX_BYTES),
        (NNX, "bf16 accumulation", MAX_BYTES),
    ],
)
def test_tiled_weights_train_as_whole_ones(model, name, max_bytes, tmp_path):
    expected, none = train(model, tmp_path / "whole", name)
    found, num_tiled = train(model, tmp_path / "tiles", name, max_bytes=max_bytes)
    assert none == 0 and num_tiled > 0
    # Sums over tiles are in another order: the bound of the streamed step against
    # plain JAX (test_reference), which fusions alone need. A bfloat16 activation that
    # is rounded the other way is off by 2^-8.
    rtol = 4e-3 if "bf16" in name else 1e-5
    np.testing.assert_allclose(found.losses, expected.losses, rtol=rtol)


def test_where_tiles_rest_changes_no_bit(tmp_path):
    expected, num_tiled = train(PYTREE, tmp_path / "a", max_bytes=MAX_BYTES)
    place = ("cpu", "nvme")
    found, _ = train(PYTREE, tmp_path / "b", place=place, max_bytes=MAX_BYTES)
    assert num_tiled > 0
    assert_bit_equal(found, expected)


def layer_loss(params: Any, batch: Any) -> jax.Array:
    y = batch["x"] @ params["kernel"] + params["bias"][None]
    return jax.numpy.mean((y - batch["y"]) ** 2)


@pytest.mark.parametrize(
    "budgets",
    [
        {"device": 256 * 1024},
        # A tile that just fits the device takes four times as much of the host.
        pytest.param({"device": 256 * 1024, "host": 256 * 1024}, marks=slow),
    ],
    ids=["device", "device and host"],
)
def test_a_layer_larger_than_the_budgets_trains_within_them(budgets, tmp_path):
    """The weight alone is four times the budget, and nobody said so anywhere."""
    hidden = 256
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(4, n)).astype("f4") for n in (hidden, 4 * hidden))
    init = {"kernel": x.T @ y / 99, "bias": np.zeros(4 * hidden, "f4")}
    assert init["kernel"].nbytes == 4 * budgets["device"]
    losses = []
    for number, memory in enumerate(({"device": "8MiB"}, budgets)):
        config = streamed_config(ON_NVME, str(tmp_path / str(number)))
        config["memory"] |= memory
        with zinf.initialize(layer_loss, init, optax.adam(1e-3), config) as engine:
            metrics = [engine.step({"x": x, "y": y}) for _ in range(STEPS)]
        losses.append([m["loss"] for m in metrics])
    for tier, nbytes in budgets.items():
        assert all(m[f"{tier}_bytes"] <= nbytes for m in metrics)
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_weight_that_cannot_be_tiled_is_named_when_it_does_not_fit(tmp_path):
    def loss(params: Any, batch: Any) -> jax.Array:
        norm = jax.numpy.linalg.norm(params["kernel"])
        return (batch @ params["kernel"]).sum() / norm

    init = {"kernel": np.ones((256, 256), "f4")}
    config = streamed_config(ON_NVME, str(tmp_path))
    config["memory"] |= {"device": 128 * 1024}
    batch = np.ones((2, 256), "f4")
    with pytest.raises(ValueError, match=r"kernel.*`(square|reduce_sum|mul)`"):
        zinf.initialize(loss, init, optax.adam(1e-3), config, batch=batch)


def language_loss(params: Any, batch: Any) -> jax.Array:
    x = params["table"][batch["tokens"]]
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    logits = x @ params["table"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    mask = (batch["tokens"] > 3).astype(np.float32)
    return (losses * mask).sum() / mask.sum()


def language(vocab: int, hidden: int, size: tuple[int, int]) -> tuple[Any, Any]:
    """Parameters of 16 dims, and a batch of `size`."""
    random = np.random.default_rng(0)
    shapes = {"table": (vocab, 16), "up": (16, hidden), "down": (hidden, 16)}
    init = {k: random.normal(size=s).astype("f4") / 8 for k, s in shapes.items()}
    names = ("tokens", "labels")
    return init, {name: random.integers(0, vocab, size, np.int32) for name in names}


@pytest.mark.parametrize(
    ("vocab", "size", "count", "devices", "budget"),
    [
        # Logits of 2 MiB and hidden layers of 512 KiB in each of two microbatches.
        (1024, (2, 512), 2, (1, 1), 1 << 20),
        # Rows that devices divide stay where they are.
        pytest.param(512, (4, 64), 1, (2, 1), 1 << 19, marks=slow),
        # Of one sequence each device has half.
        (1024, (1, 512), 1, (2, 2), 1 << 20),
    ],
    ids=["one device", "two devices", "a divided sequence"],
)
def test_intermediate_values_larger_than_the_device_exist_a_block_at_a_time(
    vocab, size, count, devices, budget
):
    init, batch = language(vocab, 256, size)
    runs = []
    for device, (num_devices, num_seq) in ((64 << 20, (1, 1)), (budget, devices)):
        config = streamed_config(ON_HOST, "") | {"persistence_threshold": 64}
        config["memory"] = {"device": device}
        config["gradient_accumulation_steps"] = count
        mesh = zinf.make_mesh(jax.devices()[:num_devices], num_seq=num_seq)
        start = language_loss, init, optax.sgd(1.0), config
        with zinf.initialize(*start, mesh=mesh) as engine:
            metrics = [engine.step(batch) for _ in range(STEPS)]
            assert all(m["device_bytes"] <= device for m in metrics)
            blocks = max(s.row_blocks for s in running_program(engine).segments)
            losses = [m["loss"] for m in metrics] + [engine.evaluate(batch)]
            runs.append((blocks, losses, engine.params()))
    (whole, expected, params), (blocks, losses, there) = runs
    assert whole == 1 and blocks >= 2 * count
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path, leaf in params.items():
        atol = 1e-5 * np.abs(leaf).max()
        np.testing.assert_allclose(there[path], leaf, rtol=0, atol=atol)


@slow
def test_tiles_train_on_a_mesh_as_whole_weights_do(tmp_path):
    init, batch = language(64, 64, (4, 8))
    losses = []
    for number, segment in enumerate(({}, {"max_bytes": 4 * MAX_BYTES})):
        config = streamed_config(ON_NVME, str(tmp_path / str(number)))
        config["segment"] |= segment
        config |= {"persistence_threshold": 64}
        start = language_loss, init, optax.adam(1e-2), config
        with zinf.initialize(*start, mesh=zinf.make_mesh(jax.devices()[:4])) as engine:
            losses.append([engine.step(batch)["loss"] for _ in range(STEPS)])
            assert len(running_program(engine).tilings) == 3 * number
    np.testing.assert_allclose(*losses, rtol=1e-5)
