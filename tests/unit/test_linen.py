from functools import cache
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
from tests.marks import slow_except
from zinf import Engine

DIM, SAMPLES, STEPS = 6, 8, 4
STREAMED_FROM_HOST = {
    "execution": "streamed",
    "segment": {"remat": "always"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
}
FUSED = {"execution": "fused"}


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


@cache
def trained_in_flax():
    """`(losses, state)` of the loop that Flax's documentation shows."""

    @jax.jit
    def step(state, batch):
        def of_params(params):
            return loss(
                params, {"batch_stats": state.batch_stats, "key": state.key}, batch
            )

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [FUSED, STREAMED_FROM_HOST])
@pytest.mark.parametrize(
    "is_given", slow_except([True], [False, True]), ids=["function", "state"]
)
def test_training_is_that_of_a_plain_linen_loop(is_given, config):
    expected_losses, expected = trained_in_flax()
    engine = zinf.linen.initialize(loss, create() if is_given else create, config)
    losses = [engine.step(b)["loss"] for b in batches()]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    state = engine.train_state()
    assert isinstance(engine, Engine)
    assert isinstance(state, StatsState)
    assert state.step == STEPS
    for name in ("params", "opt_state", "batch_stats", "key"):
        assert_close(getattr(state, name), getattr(expected, name))
    engine.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [FUSED, STREAMED_FROM_HOST])
def test_training_goes_on_from_a_state_as_if_it_had_not_stopped(config):
    straight = zinf.linen.initialize(loss, create(), config)
    losses = [straight.step(b)["loss"] for b in batches()]
    first = zinf.linen.initialize(loss, create(), config)
    for batch in batches()[:2]:
        first.step(batch)
    second = zinf.linen.initialize(loss, first.train_state(), config)
    assert second.num_steps == 2
    assert [second.step(b)["loss"] for b in batches()[2:]] == losses[2:]


@pytest.mark.parametrize("is_given", [False, True], ids=["function", "state"])
def test_a_state_can_be_had_before_the_first_batch(is_given):
    state = create()
    source = state if is_given else lambda: state
    found = zinf.linen.initialize(loss, source).train_state()
    assert found.step == 0
    for name in ("params", "opt_state", "batch_stats", "key"):
        assert_close(getattr(found, name), getattr(state, name))


def test_a_checkpoint_wins_over_the_given_state(tmp_path):
    engine = zinf.linen.initialize(loss, create(), FUSED)
    first, second, *_ = batches()
    engine.step(first)
    engine.save(tmp_path / "saved")
    expected = engine.step(second)["loss"]
    resumed = zinf.linen.initialize(loss, create(), FUSED)
    resumed.restore(tmp_path / "saved")
    assert resumed.step(second)["loss"] == expected
    assert resumed.train_state().step == 2


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("loss_fn", "has_aux", "message"),
    [
        (lambda *a: loss(*a)[0], False, r"must return \(loss, new_model_state\)"),
        (loss, True, r"must return \(loss, \(new_model_state, aux\)\)"),
        (lambda *a: (loss(*a)[0], {"cache": 1}), False, "structure of model_state"),
    ],
)
def test_a_loss_that_cannot_be_right_is_refused(loss_fn, has_aux, message):
    with pytest.raises(ValueError, match=message):
        zinf.linen.initialize(loss_fn, create, has_aux=has_aux, batch=batches()[0])


def test_the_order_of_arguments_before_is_refused_with_the_one_of_now():
    for state in (create, create()):
        with pytest.raises(ValueError, match=r"takes \(loss_fn, state, config\)"):
            zinf.linen.initialize(state, loss)
