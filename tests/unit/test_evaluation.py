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
from zinf.core.plan import InfeasibleError
from zinf.core.step.run import evaluation
from zinf.data import text_dataset
from zinf.models import GPTConfig, held_out_sums, init_and_loss

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


def twice_the_loss(params, batch):
    # The mean of two equal halves is that of the whole.
    return 2 * loss_fn(params, batch)


def as_trained(params, batch):
    """With the random key of the next step, which is the second one."""
    keys = [jax.random.fold_in(jax.random.fold_in(KEY, 1), m) for m in range(2)]
    halves = [{k: x[2 * m : 2 * m + 2] for k, x in batch.items()} for m in range(2)]
    pairs = zip(halves, keys, strict=True)
    return np.mean([switched(params, *pair, train=True) for pair in pairs])


NOISY = {"loss_fn": noisy, "has_aux": True}
LOSSES = {
    "train": ({"loss_fn": switched}, twice_the_loss),
    "key": ({**NOISY, "eval_loss_fn": keyed_evaluation}, twice_the_loss),
    "no key": ({**NOISY, "eval_loss_fn": keyless_evaluation}, twice_the_loss),
    # The user said with what `train` the loss is called.
    "told": ({"loss_fn": jax.tree_util.Partial(switched, train=True)}, as_trained),
}


@pytest.mark.parametrize(
    ("given", "config"),
    [("train", "nvme"), ("key", "mesh"), ("no key", "fused"), ("told", "nvme")],
)
def test_evaluation_is_of_its_own_loss_and_changes_nothing(config, given, tmp_path):
    settings = FUSED if config == "fused" else on_nvme(tmp_path, gradient_clipping=1.0)
    settings = {**settings, "gradient_accumulation_steps": 2}
    if config == "mesh":
        settings |= {"mesh": {"fsdp": 2}}
    named, evaluated = LOSSES[given]
    named = {**named, "params": init, "tx": SGD, "config": settings, "rng": KEY}
    with zinf.initialize(**named) as engine:
        first = engine.step(draw())["loss"]
        before, scalars, plan = content(engine), engine.scalars(), engine.plan
        found = engine.evaluate(draw(1))
        assert isinstance(found, float)
        expected = evaluated(engine.params(), draw(1))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert engine.evaluate(draw(1)) == found
        assert content(engine) == before
        assert engine.scalars() == scalars
        assert engine.plan is plan
        used = {t: engine.stores[t].ledger.used_bytes for t in engine.stores.tiers}
        assert used == {t: plan.home_bytes[t] for t in used}
        again = engine.step(draw())["loss"]
    # Training goes on as without an evaluation, and with its noise.
    with zinf.initialize(**named) as engine:
        assert [engine.step(draw())["loss"] for _ in range(2)] == [first, again]
    plain = loss_fn(jax.jit(init)(), draw())
    assert abs(first - plain) > 1e-3


def warnings_of(caplog, call):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="zinf"):
        call()
    return [record.message for record in caplog.records]


def test_an_evaluation_with_the_randomness_of_training_is_said_once(caplog):
    def random(params, batch, key):
        return switched(params, batch, key, train=True)

    for loss, rng, count in [(random, KEY, 1), (loss_fn, None, 0), (switched, KEY, 0)]:
        with zinf.initialize(loss, init, SGD, FUSED, rng=rng) as engine:
            said = warnings_of(
                caplog, lambda e=engine: [e.evaluate(draw()) for _ in range(2)]
            )
        assert ["eval_loss_fn=" in line for line in said] == [True] * count


def test_a_module_that_is_trained_in_the_mode_of_eval_is_said(caplog):
    for mode, count in (("train", 0), ("eval", 1)):
        module = Module(rngs=nnx.Rngs(0))
        getattr(module, mode)()
        said = warnings_of(
            caplog, lambda m=module: zinf.nnx.initialize(module_loss, m, SGD, FUSED)
        )
        assert ["module.train()" in line for line in said] == [True] * count


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


def module_outputs(module, batch):
    return module(batch["x"])


@pytest.mark.parametrize(
    ("config", "microbatches"), [(FUSED, 1), (STREAMED, 2)], ids=["fused", "streamed"]
)
def test_a_module_is_evaluated_and_applied_in_the_mode_of_eval(config, microbatches):
    config = {**config, "gradient_accumulation_steps": microbatches}
    create = lambda: Module(rngs=nnx.Rngs(0))  # noqa: E731
    with zinf.nnx.initialize(module_loss, create, SGD, config) as engine:
        for step in range(2):
            engine.step(draw(step))
        module = engine.update_module()
        before = jax.tree.leaves(nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)))
        found = engine.evaluate(draw(2))
        outputs = engine.apply(module_outputs, draw(2))
        after = jax.tree.leaves(
            nnx.to_pure_dict(nnx.state(engine.update_module(), nnx.BatchStat))
        )
        chex.assert_trees_all_equal(after, before, strict=True)
        module.eval()
        np.testing.assert_allclose(found, module_loss(module, draw(2)), rtol=1e-5)
        np.testing.assert_allclose(outputs, module(draw(2)["x"]), rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match=r"calls <lambda>\(module, batch\)"):
            engine.apply(lambda module: 1, draw())


def test_a_module_without_modes_is_evaluated_by_what_trains_it(monkeypatch):
    create = lambda: nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))  # noqa: E731
    with zinf.nnx.initialize(module_loss, create, SGD, STREAMED) as engine:
        monkeypatch.setattr(evaluation, "plan_forward", None)
        engine.evaluate(draw())


def test_a_train_state_is_evaluated_and_applied_in_the_mode_of_its_loss():
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

    def outputs(params, state, batch, *, train):
        return net.apply({"params": params, **state}, batch["x"], train=train)

    with zinf.linen.initialize(loss, state, FUSED, rng=KEY) as engine:
        engine.step(draw())
        after = engine.train_state()
        stats = {"batch_stats": after.batch_stats}
        expected = loss(after.params, stats, draw(1), KEY, train=False)[0]
        np.testing.assert_allclose(engine.evaluate(draw(1)), expected, rtol=1e-5)
        expected = outputs(after.params, stats, draw(1), train=False)
        found = engine.apply(outputs, draw(1))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_experts", [0, 2])
def test_the_loss_of_held_out_text_does_not_depend_on_its_batches(
    num_experts, tmp_path
):
    # The balance of experts is one of a batch.
    experts = {"capacity_factor": None, "aux_loss_coefficient": 0.0}
    shape = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_length": 8}
    shape |= {"num_experts": num_experts} | (experts if num_experts else {})
    config = GPTConfig(**shape)
    params, text = init_and_loss(config, seed=0)[0](), tmp_path / "text"
    text.write_bytes(bytes(range(60)))
    sums, found = jax.jit(held_out_sums(config)), []
    for rows in (2, 16):
        data = text_dataset(
            [str(text)],
            sequence_length=8,
            batch_size=rows,
            seed=0,
            split="validation",
            validation_fraction=0.99,
            num_epochs=1,
            fills=True,
        )
        total, weight = map(sum, zip(*(sums(params, x) for x in data), strict=True))
        assert weight == 7 * 8
        found.append(total / weight)
    np.testing.assert_allclose(*found, rtol=1e-6)


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
