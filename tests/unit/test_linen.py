"""`zinf.linen`: a `TrainState` trains as in the loop of Flax's documentation."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zinf
from tests.tiers import streamed
from tests.unit.refusals import refusals
from zinf import Engine

DIM, SAMPLES, STEPS = 6, 8, 4
STREAMED_FROM_HOST = streamed("cpu")
FUSED = {"execution": "fused"}
FIELDS = ("params", "opt_state", "batch_stats", "key")


class Net(nn.Module):
    """A convolution, batch statistics and dropout.

    No bias before the normalisation: Adam makes full steps of rounding noise, and that
    is all that its gradient would be.
    """

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (2,), use_bias=False)(x[..., None]).reshape(len(x), -1)
        x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(nn.tanh(x))
        return nn.Dense(DIM)(x)


class StatsState(TrainState):
    """TrainState with what is usually added to it."""

    batch_stats: Any
    key: Any


NET = Net()
ADAM = optax.adam(1e-2)


def create():
    variables = jax.jit(NET.init)(jax.random.key(0), jnp.ones((SAMPLES, DIM)))
    return StatsState.create(
        apply_fn=NET.apply, tx=ADAM, key=jax.random.key(1), **variables
    )


def loss(params, model_state, batch):
    key, dropout_key = jax.random.split(model_state["key"])
    out, new = NET.apply(
        {"params": params, "batch_stats": model_state["batch_stats"]},
        batch["x"],
        rngs={"dropout": dropout_key},
        mutable=["batch_stats"],
    )
    return jnp.mean(jnp.square(out - batch["y"])), {**new, "key": key}


def batches(num=STEPS):
    random = np.random.default_rng(0)
    xs, ys = random.standard_normal((2, num, SAMPLES, DIM), np.float32)
    return [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]


def trained_in_flax():
    @jax.jit
    def step(state, batch):
        def of_params(params):
            rest = {"batch_stats": state.batch_stats, "key": state.key}
            return loss(params, rest, batch)

        (value, new), grads = jax.value_and_grad(of_params, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, **new), value

    state, losses = create(), []
    for batch in batches():
        state, value = step(state, batch)
        losses.append(float(value))
    return losses, state


def assert_close(found, wanted):
    """Within some hundred float32 roundings."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert x == y
        else:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "is_given"),
    [(FUSED, False), (STREAMED_FROM_HOST, True)],
    ids=["fused, a function", "streamed, a state"],
)
def test_training_is_that_of_a_plain_linen_loop(config, is_given, tmp_path):
    expected, wanted = trained_in_flax()
    engine = zinf.linen.initialize(loss, create() if is_given else create, config)
    assert isinstance(engine, Engine)
    # A state can be had before the first batch.
    for state, steps in ((create(), 0), (wanted, STEPS)):
        if steps:
            losses = [engine.step(b)["loss"] for b in batches()]
            np.testing.assert_allclose(losses, expected, rtol=1e-5)
        found = engine.train_state()
        assert isinstance(found, StatsState)
        assert found.step == steps
        for name in FIELDS:
            assert_close(getattr(found, name), getattr(state, name))
    engine.close()


def test_training_goes_on_from_a_state_or_a_checkpoint_as_if_it_had_not_stopped(
    tmp_path,
):
    first = zinf.linen.initialize(loss, create(), STREAMED_FROM_HOST)
    for batch in batches()[:2]:
        first.step(batch)
    first.save(tmp_path / "saved")
    state = first.train_state()
    losses = [first.step(b)["loss"] for b in batches()[2:]]
    second = zinf.linen.initialize(loss, state, STREAMED_FROM_HOST)
    assert second.num_steps == 2
    assert [second.step(b)["loss"] for b in batches()[2:]] == losses
    # A checkpoint wins over the given state.
    third = zinf.linen.initialize(loss, create(), STREAMED_FROM_HOST)
    third.restore(tmp_path / "saved")
    assert [third.step(b)["loss"] for b in batches()[2:]] == losses
    assert third.train_state().step == STEPS


def test_model_state_that_the_loss_leaves_out_stays():
    def without_key(params, model_state, batch):
        value, new = loss(params, model_state, batch)
        return value, ({"batch_stats": new["batch_stats"]}, jnp.size(batch["x"]))

    engine = zinf.linen.initialize(without_key, create, FUSED, has_aux=True)
    metrics = engine.step(batches()[0])
    assert metrics["aux"] == SAMPLES * DIM
    assert engine.train_state().key == jax.random.key(1)


def plain_loss(params, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    out = params["w"][None] * (batch["x"] + noise)
    return jnp.mean(jnp.square(out - params["b"][None]))


def test_a_plain_state_takes_a_plain_loss_and_frozen_entries_are_initial():
    tx = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0, impl="rbg")), ADAM)
    params = {"w": jnp.full(DIM, 2.0), "b": jnp.full(DIM, 3.0)}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    config = {**FUSED, "frozen": ["b"]}
    engine = zinf.linen.initialize(plain_loss, state, config, rng=jax.random.key(0))
    engine.step(batches()[0])
    found = engine.train_state()
    assert jax.tree.structure(found) == jax.tree.structure(state)
    noise_state, (adam_state, _) = found.opt_state
    np.testing.assert_array_equal(found.params["b"], params["b"])
    np.testing.assert_array_equal(adam_state.mu["b"], np.zeros(DIM))
    assert np.all(adam_state.mu["w"] != 0)
    assert noise_state.count == adam_state.count == 1
    assert noise_state.rng_key.dtype == state.opt_state[0].rng_key.dtype


def test_arguments_that_cannot_be_right_are_refused(golden):
    def start(loss_fn, state=create, **rest):
        return lambda: zinf.linen.initialize(loss_fn, state, batch=batches()[0], **rest)

    cases = {
        "the loss alone": start(lambda *a: loss(*a)[0]),
        "no aux, with has_aux": start(loss, has_aux=True),
        "another model state": start(lambda *a: (loss(*a)[0], {"cache": 1})),
        "the state first": start(create(), loss),
        "a function of the state first": start(create, loss),
    }
    golden.check("linen_refusals.txt", refusals(cases))
