"""Batch statistics and other state that a loss returns are carried alike anywhere."""

from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.training import streamed_config
from tests.marks import slow_except

DIM, BATCH, LAYERS, STEPS = 8, 6, 3, 5
TX = optax.sgd(0.1, momentum=0.9)


def init() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {"layers": [{"w": jax.random.normal(k, (DIM, DIM)) * 0.3} for k in keys]}


def initial_state() -> Any:
    statistics = [{"mean": jnp.zeros(DIM), "count": jnp.int32(0)}] * LAYERS
    return {"layers": statistics, "key": jax.random.key(3, impl="unsafe_rbg")}


def loss(params: Any, state: Any, batch: Any) -> Any:
    """Centred by a running mean, with noise from a key that goes on in every step."""
    key, noise_key = jax.random.split(state["key"])
    x, new = batch + 0.1 * jax.random.normal(noise_key, batch.shape), []
    for p, s in zip(params["layers"], state["layers"], strict=True):
        h = x @ p["w"]
        mean = 0.9 * s["mean"] + 0.1 * h.mean(0)
        new.append({"mean": mean, "count": s["count"] + 1})
        x = x + jnp.tanh(h - mean[None])
    return jnp.mean(jnp.square(x)), {"layers": new, "key": key}


def batches() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((STEPS, BATCH, DIM), np.float32)


def plain(tree: Any) -> Any:
    return {**tree, "key": jax.random.key_data(tree["key"])}


@cache
def train_in_jax(count: int) -> Any:
    @partial(jax.jit, static_argnums=0)
    def step(count, params, state, opt, batch):
        def mean_loss(params):
            parts = [loss(params, state, b) for b in jnp.split(batch, count)]
            losses, states = zip(*parts, strict=True)
            means = jax.tree.map(lambda *x: mean_of(x), *map(plain, states))
            return sum(losses) / count, {**means, "key": states[-1]["key"]}

        (value, state), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
        updates, opt = TX.update(grads, opt, params)
        return optax.apply_updates(params, updates), state, opt, value

    params, state = init(), initial_state()
    opt, losses = TX.init(params), []
    for batch in batches():
        params, state, opt, value = step(count, params, state, opt, batch)
        losses.append(float(value))
    return losses, plain(state)


def mean_of(values: Any) -> jax.Array:
    """Statistics are averaged over microbatches; counts and keys advance once."""
    is_float = jnp.issubdtype(values[0].dtype, jnp.floating)
    return sum(values) / len(values) if is_float else values[-1]


def train(config: dict[str, Any]) -> Any:
    engine = zinf.initialize(loss, init, TX, config, model_state=initial_state)
    losses = [engine.step(batch)["loss"] for batch in batches()]
    state = plain(engine.model_state())
    engine.close()
    return losses, state


@pytest.mark.parametrize("count", slow_except([2], [1, 2]))
def test_state_is_that_of_plain_jax_and_bit_equal_on_all_tiers(count, tmp_path):
    variant = {"gradient_accumulation_steps": count}
    wanted = train_in_jax(count)
    expected = train(streamed_config(("none", "none"), "") | variant)
    for placement in (("cpu", "none"), ("nvme", "nvme")):
        found = train(
            streamed_config(placement, str(tmp_path / placement[0])) | variant
        )
        assert found[0] == expected[0]
        chex.assert_trees_all_equal(found[1], expected[1], strict=True)
    for run in (expected, train({"execution": "fused"} | variant)):
        # As in test_reference: the order of float32 sums.
        np.testing.assert_allclose(run[0], wanted[0], rtol=1e-5)
        chex.assert_trees_all_close(run[1], wanted[1], rtol=1e-5, atol=1e-6)
    assert run[1]["layers"][0]["count"] == STEPS
