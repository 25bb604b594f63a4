"""What `evaluate` computes: not the dropout of training, if there is a way to know."""

import logging

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zinf
from tests.robustness.small import DIM, content, draw, init, loss_fn, on_nvme
from zinf.models import GPTConfig, init_and_loss
from zinf.plan import InfeasibleError

FUSED = {"execution": "fused"}
STREAMED = {"execution": "streamed"}
KEY = jax.random.key(3)
SGD = optax.sgd(0.1)


def noise(key):
    return jax.random.normal(key, (1, DIM))


def switched(params, batch, key, *, train):
    """With noise in training, and with twice the loss in evaluation."""
    assert isinstance(train, bool)
    if train:
        return loss_fn(params, {**batch, "x": batch["x"] + noise(key)})
    return 2 * loss_fn(params, batch)


def noisy(params, batch, key):
    return switched(params, batch, key, train=True), {"aux": 1}


def keyed_evaluation(params, batch, key):
    return 2 * loss_fn(params, batch) + 0 * noise(key)[0, 0], {"aux": 1}


def keyless_evaluation(params, batch):
    # A mask of its own, which the loss closes over.
    mask = jnp.asarray(np.tile(np.arange(DIM) >= 0, (64, 1)))[: len(batch["x"])]
    return 2 * loss_fn(params, {**batch, "x": jnp.where(mask, batch["x"], 0)})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", ["fused", "streamed", "nvme", "clipped", "mesh"])
@pytest.mark.parametrize("given", ["train", "key", "no key"])
def test_evaluation_is_of_its_own_loss_and_changes_nothing(config, given, tmp_path):
    settings = {
        "fused": FUSED,
        "streamed": STREAMED,
        "nvme": on_nvme(tmp_path),
        "clipped": on_nvme(tmp_path, gradient_clipping=1.0),
        "mesh": {**on_nvme(tmp_path), "mesh": {"fsdp": 2}, "persistence_threshold": 1},
    }[config]
    settings = {**settings, "gradient_accumulation_steps": 2}
    named = {
        "train": {"loss": switched},
        "key": {"loss": noisy, "has_aux": True, "eval_loss_fn": keyed_evaluation},
        "no key": {"loss": noisy, "has_aux": True, "eval_loss_fn": keyless_evaluation},
    }[given]
    loss = named.pop("loss")
    batch = draw(1)
    with zinf.initialize(loss, init, SGD, settings, rng=KEY, **named) as engine:
        first = engine.step(draw())["loss"]
        before, scalars, plan = content(engine), engine.scalars(), engine.plan
        found = engine.evaluate(batch)
        # The mean of two equal halves is that of the whole.
        expected = 2 * loss_fn(engine.params(), batch)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert engine.evaluate(batch) == found
        assert content(engine) == before
        assert engine.scalars() == scalars
        assert engine.plan is plan
        used = {t: engine.stores[t].ledger.used_bytes for t in engine.stores.tiers}
        assert used == {t: plan.home_bytes[t] for t in used}
        again = engine.step(draw())["loss"]
    # Training goes on as without an evaluation, and with its noise.
    with zinf.initialize(loss, init, SGD, settings, rng=KEY, **named) as engine:
        assert [engine.step(draw())["loss"] for _ in range(2)] == [first, again]
    plain = loss_fn(jax.jit(init)(), draw())
    assert abs(first - plain) > 1e-3


def test_layers_that_rest_by_row_are_evaluated_by_row(tmp_path):
    """A scan over layers in training, and the same scan in evaluation."""

    def scanned(params, batch, train):
        def layer(x, w):
            return jnp.tanh(x @ w) * (0.5 if train else 1.0), None

        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        return jnp.mean(jnp.square(x - batch["y"]))

    params = {"layers": jax.random.normal(KEY, (4, DIM, DIM))}
    with zinf.initialize(scanned, params, SGD, on_nvme(tmp_path)) as engine:
        engine.step(draw())
        assert any(array.rows for array in engine.plan.homes)
        expected = scanned(engine.params(), draw(1), train=False)
        np.testing.assert_allclose(engine.evaluate(draw(1)), expected, rtol=1e-5)


@pytest.mark.slow
def test_model_state_is_read_and_not_written():
    def loss(params, state, batch, *, train):
        mean = batch["x"].mean(0, keepdims=True) if train else state["mean"]
        new = {"mean": mean} if train else None
        return loss_fn(params, {**batch, "x": batch["x"] - mean}), new

    state = {"mean": jnp.zeros((1, DIM))}
    for config in (FUSED, STREAMED):
        engine = zinf.initialize(loss, init, SGD, config, model_state=state)
        engine.step(draw())
        kept = engine.model_state()
        expected = loss(engine.params(), kept, draw(1), train=False)[0]
        np.testing.assert_allclose(engine.evaluate(draw(1)), expected, rtol=1e-5)
        np.testing.assert_array_equal(engine.model_state()["mean"], kept["mean"])
        engine.close()


def test_a_loss_that_is_told_by_its_user_is_left_as_it_is():
    told = jax.tree_util.Partial(switched, train=True)
    engine = zinf.initialize(told, init, SGD, FUSED, rng=KEY)
    engine.step(draw())
    expected = switched(engine.params(), draw(), jax.random.fold_in(KEY, 1), train=True)
    np.testing.assert_allclose(engine.evaluate(draw()), expected, rtol=1e-5)
    engine.close()


def test_an_evaluation_with_the_randomness_of_training_is_said_once(caplog):
    def random(params, batch, key):
        return switched(params, batch, key, train=True)

    cases = [(random, KEY, 1), (loss_fn, None, 0), (switched, KEY, 0)]
    for loss, rng, count in cases:
        engine = zinf.initialize(loss, init, SGD, FUSED, rng=rng)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="zinf"):
            engine.evaluate(draw())
            engine.evaluate(draw())
        assert len(caplog.records) == count
        assert all("eval_loss_fn=" in r.message for r in caplog.records)
        engine.close()


def test_an_evaluation_that_does_not_fit_is_found_before_the_first_step():
    def wide(params, batch):
        rows = jnp.tile(batch["x"], (4096, 1)) @ params["out"]
        return loss_fn(params, batch) + jnp.mean(jnp.sort(rows, axis=0))

    config = STREAMED | {"memory": {"device": "64KiB"}}
    with zinf.initialize(loss_fn, init, SGD, config, eval_loss_fn=wide) as engine:
        batches = [draw(i) for i in range(4)]
        named = {"steps": 2, "evaluation_data": batches, "evaluate_every": 2}
        with pytest.raises(InfeasibleError):
            zinf.Trainer(engine, batches, **named).run()
        assert engine.num_steps == 0
        assert engine.step(draw())["step"] == 1


# Adapters.


class Module(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def module_loss(module, batch):
    return jnp.mean(jnp.square(module(batch["x"]) - batch["y"]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [FUSED, STREAMED], ids=["fused", "streamed"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_module_is_evaluated_in_the_mode_of_eval(config, microbatches):
    config = {**config, "gradient_accumulation_steps": microbatches}
    create = lambda: Module(rngs=nnx.Rngs(0))  # noqa: E731
    with zinf.nnx.initialize(module_loss, create, SGD, config) as engine:
        for step in range(2):
            engine.step(draw(step))
        module = engine.update_module()
        before = jax.tree.leaves(nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)))
        found = engine.evaluate(draw(2))
        module.eval()
        np.testing.assert_allclose(found, module_loss(module, draw(2)), rtol=1e-5)
        after = jax.tree.leaves(
            nnx.to_pure_dict(nnx.state(engine.update_module(), nnx.BatchStat))
        )
        chex.assert_trees_all_equal(after, before, strict=True)


def test_a_module_without_modes_is_evaluated_by_what_trains_it():
    create = lambda: nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))  # noqa: E731
    with zinf.nnx.initialize(module_loss, create, SGD, STREAMED) as engine:
        engine.evaluate(draw())
        (evaluate,) = engine._forward._made.values()
        assert evaluate.forward.segments is engine._current.streamed.segments


def test_a_module_that_is_trained_in_the_mode_of_eval_is_said(caplog):
    for mode, count in (("train", 0), ("eval", 1)):
        module = Module(rngs=nnx.Rngs(0))
        getattr(module, mode)()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="zinf"):
            zinf.nnx.initialize(module_loss, module, SGD, FUSED)
        assert len(caplog.records) == count
        assert all("module.train()" in r.message for r in caplog.records)


def test_a_train_state_is_evaluated_by_its_own_loss():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(DIM)(x))
            return nn.Dropout(0.5, deterministic=not train)(x)

    class State(TrainState):
        batch_stats: dict

    net = Net()
    variables = net.init(jax.random.key(0), draw()["x"], train=False)
    rest = {"batch_stats": variables["batch_stats"]}
    state = State.create(apply_fn=net.apply, params=variables["params"], tx=SGD, **rest)

    def loss(params, state, batch, key, *, train):
        out, new = net.apply(
            {"params": params, **state},
            batch["x"],
            train=train,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return jnp.mean(jnp.square(out - batch["y"])), new

    with zinf.linen.initialize(loss, state, FUSED, rng=KEY) as engine:
        engine.step(draw())
        after = engine.train_state()
        stats = {"batch_stats": after.batch_stats}
        expected = loss(after.params, stats, draw(1), KEY, train=False)[0]
        np.testing.assert_allclose(engine.evaluate(draw(1)), expected, rtol=1e-5)


@pytest.mark.slow
def test_the_gpt_of_zinf_train_is_evaluated_without_dropout():
    shape = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_length": 8}
    create, loss = init_and_loss(GPTConfig(**shape, dropout=0.5), seed=0)
    _, plain = init_and_loss(GPTConfig(**shape), seed=0)
    batch = {"tokens": np.arange(18, dtype=np.int32).reshape(2, 9)}
    with zinf.initialize(loss, create, SGD, STREAMED, rng=KEY) as engine:
        found = engine.evaluate(batch)
        expected = plain(engine.params(), batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
