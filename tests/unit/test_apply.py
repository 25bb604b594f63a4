"""`engine.apply`: any function of the parameters, over the arrays of an engine."""

import re
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.robustness.small import (
    DIM,
    content,
    draw,
    expect_at_rest,
    init,
    loss_fn,
    on_nvme,
)
from tests.unit.refusals import error_of, text_of
from zinf.core.optim.average import with_reference
from zinf.core.plan import InfeasibleError, Pass, Run, Transfer
from zinf.core.program import Role, Tier
from zinf.core.segment import executables
from zinf.core.step.run.forward import ForwardRunner, joined

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
    runner = list(list(engine._programs.made._made.values())[-1].values())[-1]
    assert isinstance(runner, ForwardRunner)
    return runner


def test_a_function_returns_what_it_computes_and_training_goes_on(tmp_path):
    settings = on_nvme(tmp_path, gradient_clipping=1.0)
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


# How a pass runs.


@pytest.fixture(scope="module")
def on_drive(tmp_path_factory):
    """An engine that takes no step: whoever gets it only reads."""
    config = on_nvme(tmp_path_factory.mktemp("nvme"))
    with zinf.initialize(loss_fn, init, SGD, config, batch=draw()) as made:
        yield made


def test_outputs_go_to_the_host_when_they_are_made(on_drive):
    on_drive.apply(features, draw())
    plan = runner_of(on_drive).plan
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


def test_microbatches_give_the_rows_of_the_batch(on_drive):
    whole = on_drive.apply(logits, draw(0, 8))
    parts = on_drive.apply(logits, draw(0, 8), num_microbatches=4)
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)
    plan = runner_of(on_drive).plan
    read = [i for i in plan.instructions if i.link == "nvme read"]
    # Each parameter is read once for all microbatches.
    assert sum(i.nbytes for i in read) == plan.home_bytes[Tier.NVME]


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


def test_a_leaf_that_rests_by_row_is_evaluated_by_row_and_read_as_a_whole(tmp_path):
    def scanned(params, batch, train):
        """Layers in training, and others in evaluation."""

        def layer(x, w):
            return jnp.tanh(x @ w) * (0.5 if train else 1.0), None

        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean(jnp.square(x - batch["y"]))

    def norms(params, batch):
        return jnp.sqrt(jnp.sum(jnp.square(params), axis=(1, 2))), params[1, 0], params

    layers = jax.random.normal(KEY, (4, DIM, DIM))
    with zinf.initialize(scanned, layers, SGD, on_nvme(tmp_path)) as engine:
        engine.step(draw())
        assert any(array.rows for array in engine.plan.homes)
        expected = scanned(engine.params(), draw(1), train=False)
        np.testing.assert_allclose(engine.evaluate(draw(1)), expected, rtol=1e-5)
        expected = jax.device_get(norms(engine.params(), None))
        chex.assert_trees_all_close(engine.apply(norms, None), expected, rtol=1e-6)


# Refusals.


def with_callback(params, batch):
    jax.experimental.io_callback(print, None, batch["x"])
    return logits(params, batch)


def random(params, batch, key):
    return logits(params, batch) + jax.random.normal(key, (1, DIM))


@pytest.fixture(scope="module")
def engine():
    with zinf.initialize(loss_fn, init, SGD, STREAMED, batch=draw()) as made:
        yield made


def test_what_cannot_be_applied_is_refused_by_name(engine, golden):
    apply = partial(engine.apply, batch=draw())
    before = zinf.initialize(loss_fn, init, SGD, STREAMED)
    cases = {
        "a parameter that is not there": lambda: apply(lambda p, b: p["head"]),
        "nothing returned": lambda: apply(lambda p, b: None),
        "text returned": lambda: apply(lambda p, b: {"x": b["x"], "note": "done"}),
        "an effect": lambda: apply(with_callback),
        "a key is needed": lambda: apply(random),
        "a key that is none": lambda: apply(random, key=7),
        "a key that is not wanted": lambda: apply(logits, key=KEY),
        "one argument": lambda: apply(lambda params: 1),
        "no function": lambda: apply({"x": 1}),
        "an output without rows": lambda: apply(features, num_microbatches=4),
        "no microbatch": lambda: apply(logits, num_microbatches=0),
        "before the first batch": lambda: before.apply(logits, draw()),
    }
    errors = {name: error_of(call) for name, call in cases.items()}
    golden.check("apply_refusals.txt", text_of(errors))
    notes = " ".join(errors["a parameter that is not there"].__notes__)
    assert "<lambda> raised this" in notes
    assert "layers/0/b, layers/0/w" in notes
    expect_at_rest(engine)


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


def test_the_program_that_was_used_least_recently_is_made_again(engine, monkeypatch):
    monkeypatch.setattr(engine._programs.made, "_limit", 2)
    traced = []

    def function(name):
        def named(params, batch):
            traced.append(name)
            return logits(params, batch)

        return named

    functions = {name: function(name) for name in "abc"}
    for name in "abacab":
        engine.apply(functions[name], draw())
    assert traced == ["a", "b", "c", "b"]
    assert len(engine._programs.made._made) == 2


def run_example(heading):
    """What the example of a section of the README defines."""
    section = README.read_text().partition(heading)[2].partition("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(example, names)
    return names


def test_a_module_of_equinox_trains_as_the_readme_says():
    names = run_example("## Modules of Equinox")
    params, made = jax.tree.leaves(names["params"]()), jax.tree.leaves(names["model"])
    arrays = [x for x in made if isinstance(x, np.ndarray | jax.Array)]
    assert [x.shape for x in params] == [x.shape for x in arrays]
    assert any((x != y).any() for x, y in zip(params, arrays, strict=True))


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_example("## What else runs over the residents")
    assert names["scores"].shape == (8,)
    assert np.all(names["scores"] < 0)


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_reference_that_moves_is_applied_from_where_it_rests(tier, tmp_path):
    config = {} if tier == "device" else on_nvme(tmp_path)
    tx = optax.chain(SGD, with_reference(0.25, every=2))
    with zinf.initialize(loss_fn, init, tx, config, batch=draw()) as engine:
        wanted = engine.params()
        before = engine.apply(logits, draw(9))
        for step in range(4):
            engine.step(draw(step))
            if step % 2:
                wanted = jax.tree.map(
                    lambda x, w: 0.75 * x + 0.25 * w, wanted, engine.params()
                )
            found = engine.apply(logits, draw(9), kind="reference")
            if not step:
                np.testing.assert_array_equal(found, before)
            np.testing.assert_allclose(found, logits(wanted, draw(9)), atol=1e-6)
