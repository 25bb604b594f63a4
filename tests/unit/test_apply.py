"""`engine.apply`: any function of the parameters, over the arrays of an engine."""

import functools
import re
from pathlib import Path

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
from tests.marks import slow_except
from tests.robustness.small import (
    DIM,
    content,
    draw,
    expect_at_rest,
    init,
    loss_fn,
    on_nvme,
)
from zinf.executor.forward import ForwardRunner, joined
from zinf.plan import InfeasibleError, Pass, Run, Transfer
from zinf.program import Role, Tier
from zinf.segment import executables

FUSED = {"execution": "fused"}
STREAMED = {"execution": "streamed"}
KEY = jax.random.key(3)
SGD = optax.sgd(0.1)
README = Path(__file__).parents[2] / "zinf" / "README.md"


def features(params, batch):
    """Outputs of every kind: of layers, repeated, inputs, parameters, numbers."""
    x, hidden = batch["x"], []
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"][None])
        hidden.append(x)
    logits = x @ params["out"]
    return {
        "hidden": hidden,
        "again": hidden[0],
        "logits": logits,
        "choice": logits.argmax(-1),
        "mean": x.mean(),
        "inputs": (batch["x"], params["layers"][0]["b"], 3),
    }


def logits(params, batch):
    return features(params, batch)["logits"]


def runner_of(engine):
    """The program that the engine used last."""
    runner = list(engine._forward._made.values())[-1]
    assert isinstance(runner, ForwardRunner)
    return runner


@pytest.mark.parametrize("config", slow_except(["nvme"], ["fused", "nvme"]))
def test_a_function_returns_what_it_computes_and_training_goes_on(config, tmp_path):
    settings = FUSED if config == "fused" else on_nvme(tmp_path, gradient_clipping=1.0)
    losses = []
    with zinf.initialize(loss_fn, init, optax.adam(1e-2), settings) as engine:
        losses.append(engine.step(draw())["loss"])
        found = engine.apply(features, draw(1, 6))
        expect_at_rest(engine)
        before, scalars = content(engine), engine.scalars()
        expected = features(engine.params(), draw(1, 6))
        chex.assert_trees_all_close(found, jax.device_get(expected), rtol=1e-5)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(found))
        chex.assert_trees_all_equal(engine.apply(features, draw(1, 6)), found)
        assert (content(engine), engine.scalars()) == (before, scalars)
        losses += [engine.step(draw(i))["loss"] for i in (1, 2)]
        expect_at_rest(engine)
    with zinf.initialize(loss_fn, init, optax.adam(1e-2), settings) as engine:
        assert [engine.step(draw(i))["loss"] for i in range(3)] == losses


def test_outputs_go_to_the_host_when_they_are_made(tmp_path):
    with zinf.initialize(loss_fn, init, SGD, on_nvme(tmp_path), batch=draw()) as engine:
        engine.apply(features, draw())
        plan = runner_of(engine).plan
    operations = [i.operation for i in plan.instructions]
    runs = [i for i, x in enumerate(operations) if isinstance(x, Run)]
    assert {operations[i].kind for i in runs} == {Pass.FORWARD}
    offloads = [
        i
        for i, x in enumerate(operations)
        if isinstance(x, Transfer) and x.target == Tier.HOST and x.source == Tier.DEVICE
    ]
    # One for each layer, before the next layer begins, and one for the rest.
    assert len(offloads) == 3
    assert all(a < b for a, b in zip(offloads, runs[1:], strict=False))
    roles = {a.role for i in plan.instructions for a, _ in i.writes}
    assert roles == {Role.PARAM, Role.VALUE}
    # All outputs are on the host at the end: they count in its peak.
    sizes = [x.nbytes for x in (draw()["x"],) * 4]
    assert plan.peak_bytes[Tier.HOST] >= sum(sizes)


def test_the_second_call_traces_and_compiles_nothing(monkeypatch):
    traced, compiled = [], []

    def counted(params, batch):
        traced.append(1)
        return logits(params, batch)

    with zinf.initialize(loss_fn, init, SGD, STREAMED, batch=draw()) as engine:
        first = engine.apply(counted, draw())
        monkeypatch.setattr(executables, "compile_for", None)
        listen = lambda event, *_, **__: compiled.append(event)  # noqa: E731
        jax.monitoring.register_event_duration_secs_listener(listen)
        engine.apply(counted, draw(1))
        assert not [event for event in compiled if "compile" in event]
        np.testing.assert_array_equal(engine.apply(counted, draw()), first)
        assert len(traced) == 1
        monkeypatch.undo()
        assert engine.apply(counted, draw(0, 8)).shape == (8, DIM)
        assert len(traced) == 2


def test_microbatches_give_the_rows_of_the_batch(tmp_path):
    with zinf.initialize(loss_fn, init, SGD, on_nvme(tmp_path), batch=draw()) as engine:
        whole = engine.apply(logits, draw(0, 8))
        parts = engine.apply(logits, draw(0, 8), num_microbatches=4)
        np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)
        plan = runner_of(engine).plan
        read = [i for i in plan.instructions if i.link == "nvme read"]
        # Each parameter is read once for all microbatches.
        assert sum(i.nbytes for i in read) == plan.home_bytes[Tier.NVME]
        with pytest.raises(ValueError, match=r"features must return.*'inputs/1' has"):
            engine.apply(features, draw(0, 8), num_microbatches=4)
        with pytest.raises(ValueError, match="num_microbatches"):
            engine.apply(logits, draw(0, 8), num_microbatches=0)


def test_rows_of_several_processes_are_in_the_order_of_their_batches():
    # Two processes with rows 0 to 3 and 4 to 7, in two microbatches.
    microbatches = [np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7])]
    np.testing.assert_array_equal(joined(microbatches, 2), np.arange(8))


def test_the_key_the_state_and_train_are_those_of_evaluation():
    def loss(params, state, batch, key, *, train):
        return loss_fn(params, batch), {"count": state["count"] + 1}

    def noisy(params, state, batch, key, *, train):
        assert train is False
        noise = jax.random.normal(key, batch["x"].shape)
        return {"noise": noise, "count": state["count"]}

    state = {"count": jnp.zeros((), jnp.int32)}
    rest = {"model_state": state, "rng": KEY}
    with zinf.initialize(loss, init, SGD, STREAMED, **rest) as engine:
        engine.step(draw())
        found = engine.apply(noisy, draw(), key=jax.random.key(7))
        noise = jax.random.normal(jax.random.key(7), draw()["x"].shape)
        np.testing.assert_array_equal(found["noise"], noise)
        assert found["count"] == 1
        other = engine.apply(noisy, draw(), key=jax.random.key(8))
        assert not np.array_equal(other["noise"], found["noise"])
        assert engine.model_state()["count"] == 1


def test_a_leaf_that_rests_by_row_may_be_read_as_a_whole(tmp_path):
    def scanned(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)
        return jnp.mean(jnp.square(x - batch["y"]))

    def norms(params, batch):
        return jnp.sqrt(jnp.sum(jnp.square(params), axis=(1, 2))), params[1, 0], params

    layers = jax.random.normal(KEY, (4, DIM, DIM))
    with zinf.initialize(scanned, layers, SGD, on_nvme(tmp_path)) as engine:
        engine.step(draw())
        assert any(array.rows for array in engine.plan.homes)
        expected = jax.device_get(norms(engine.params(), None))
        chex.assert_trees_all_close(engine.apply(norms, None), expected, rtol=1e-6)


# Refusals.


def missing(params, batch):
    return batch["x"] @ params["head"]


def nothing(params, batch):
    logits(params, batch)


def text(params, batch):
    return {"logits": logits(params, batch), "note": "done"}


def printing(params, batch):
    jax.experimental.io_callback(print, None, batch["x"])
    return logits(params, batch)


def random(params, batch, key):
    return logits(params, batch) + jax.random.normal(key, (1, DIM))


REFUSED = {
    "missing": (missing, KeyError, "head"),
    "nothing": (nothing, ValueError, "nothing returned None, in which there is no"),
    "text": (text, ValueError, "text returned 'note' as 'done', which is no array"),
    "effect": (printing, NotImplementedError, "printing contains `io_callback` with"),
    "key": (random, ValueError, r"random\(params, batch\).*pass key=jax.random.key"),
    "arguments": (lambda params: 1, ValueError, r"calls <lambda>\(params, batch\)"),
    "no function": ({"x": 1}, ValueError, "takes a function and a batch; found dict"),
}


@pytest.fixture(scope="module")
def engine():
    with zinf.initialize(loss_fn, init, SGD, STREAMED, batch=draw()) as made:
        yield made


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_applied_is_refused_by_name(engine, case):
    function, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message) as caught:
        engine.apply(function, draw())
    if case == "missing":
        notes = " ".join(caught.value.__notes__)
        assert "missing raised this" in notes
        assert "layers/0/b, layers/0/w" in notes
    expect_at_rest(engine)


def test_a_key_that_is_none_or_not_wanted_is_refused(engine):
    with pytest.raises(ValueError, match="key must be a random key.*found int"):
        engine.apply(random, draw(), key=7)
    with pytest.raises(ValueError, match="It takes no key: leave key= out"):
        engine.apply(logits, draw(), key=KEY)


def test_before_the_first_batch_nothing_can_be_applied():
    with zinf.initialize(loss_fn, init, SGD, STREAMED) as engine:
        with pytest.raises(ValueError, match="take a step first"):
            engine.apply(logits, draw())


def test_outputs_that_do_not_fit_the_host_are_refused_with_their_bytes(tmp_path):
    def wide(params, batch):
        return jnp.tile(logits(params, batch), (64, 64))

    config = on_nvme(tmp_path)
    config["memory"] = config["memory"] | {"host": "192KiB"}
    with zinf.initialize(loss_fn, init, SGD, config, batch=draw()) as engine:
        outputs = 64 * 4 * 64 * DIM * 4
        with pytest.raises(InfeasibleError, match="the outputs of wide") as caught:
            engine.apply(wide, draw())
        needed = caught.value.shortages[Tier.HOST].needed_bytes
        assert needed == outputs + engine.plan.home_bytes[Tier.HOST]
        assert "The outputs take 512 KiB of that" in str(caught.value)
        assert engine.apply(logits, draw()).shape == (4, DIM)


def test_a_program_that_was_not_used_for_long_is_made_again(engine, monkeypatch):
    monkeypatch.setattr(engine._forward, "_limit", 2)
    functions = [functools.partial(logits) for _ in range(3)]
    for function in functions:
        engine.apply(function, draw())
    assert len(engine._forward._made) == 2


# Adapters.


def test_a_function_gets_the_module_in_the_mode_of_eval():
    class Module(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    def loss(module, batch):
        return jnp.mean(jnp.square(module(batch["x"]) - batch["y"]))

    def outputs(module, batch):
        return module(batch["x"])

    create = lambda: Module(rngs=nnx.Rngs(0))  # noqa: E731
    with zinf.nnx.initialize(loss, create, SGD, STREAMED) as engine:
        engine.step(draw())
        found = engine.apply(outputs, draw())
        module = engine.update_module()
        module.eval()
        np.testing.assert_allclose(found, module(draw()["x"]), rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match=r"calls <lambda>\(module, batch\)"):
            engine.apply(lambda module: 1, draw())


@pytest.mark.slow
def test_a_function_gets_the_fields_of_a_train_state():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(DIM)(x))

    class State(TrainState):
        batch_stats: dict

    net = Net()
    variables = net.init(jax.random.key(0), draw()["x"], train=False)
    rest = {"batch_stats": variables["batch_stats"]}
    state = State.create(apply_fn=net.apply, params=variables["params"], tx=SGD, **rest)

    def loss(params, state, batch, *, train):
        tree = {"params": params, **state}
        out, new = net.apply(tree, batch["x"], train=train, mutable=["batch_stats"])
        return jnp.mean(jnp.square(out - batch["y"])), new

    def outputs(params, state, batch, *, train):
        return net.apply({"params": params, **state}, batch["x"], train=train)

    with zinf.linen.initialize(loss, state, FUSED) as engine:
        engine.step(draw())
        after = engine.train_state()
        stats = {"batch_stats": after.batch_stats}
        expected = outputs(after.params, stats, draw(1), train=False)
        found = engine.apply(outputs, draw(1))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = README.read_text().partition("## What else runs over the residents")[2]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["scores"].shape == (8,)
    assert np.all(names["scores"] < 0)
