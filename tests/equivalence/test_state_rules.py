"""The model state of a step, from those of its microbatches."""

from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zinf

WEIGHT = np.eye(4, dtype=np.float32)
BATCH = np.array([[1, 2, 7, 0], [3, -5, 1, 1]] * 4, np.float32)
STATE = {
    "count": np.int32(10),
    "max": np.float32(-1),
    "mean": np.float32(4),
    "seen": np.bool_(False),
    "sum": np.float32(0.5),
}
RULES = {"count": "sum", "max": "max", "s*": "sum", "seen": "max"}


def loss(params: Any, state: Any, batch: Any) -> Any:
    new = {
        "count": state["count"] + jnp.int32(len(batch)),
        "max": jnp.maximum(state["max"], jnp.max(batch)),
        "mean": state["mean"] * 0.5 + jnp.mean(batch) * 0.5,
        "seen": state["seen"] | jnp.any(batch > 6),
        "sum": state["sum"] + jnp.sum(batch),
    }
    return jnp.mean(jnp.square(batch @ params)), new


@pytest.mark.parametrize("execution", ["streamed", "fused"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_each_leaf_follows_its_rule(execution, num_microbatches):
    """Each microbatch has whole pairs of rows, so means of means are means."""
    config = {
        "execution": execution,
        "gradient_accumulation_steps": num_microbatches,
    }
    named = {"model_state": STATE, "state_rules": RULES}
    arguments = loss, WEIGHT, optax.sgd(0.1), config
    with closing(zinf.initialize(*arguments, **named)) as engine:
        engine.step(BATCH)
        found = engine.model_state()
    assert found["count"] == 10 + len(BATCH)
    assert found["max"] == 7
    assert found["mean"] == pytest.approx(4 * 0.5 + BATCH.mean() * 0.5)
    assert found["seen"]
    assert found["sum"] == 0.5 + BATCH.sum()
    assert {n: x.dtype for n, x in found.items()} == {
        n: x.dtype for n, x in STATE.items()
    }
    verified = zinf.verify(*arguments, batch=BATCH, **named)
    assert verified.agrees, str(verified)


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        ({}, "'count' is int32, and a step has 2 microbatches"),
        ({"count": "sum"}, "'seen' is bool"),
        ({"*": "mean"}, "'count' is int32, and its rule is 'mean'"),
        ({"count": "average"}, "the rule of 'count' is 'average'; it must be one of"),
        ({"counts": "sum"}, "no leaf of the model state matches 'counts'"),
    ],
)
def test_a_leaf_without_a_mean_needs_a_rule(rules, error):
    config = {"gradient_accumulation_steps": 2}
    arguments = loss, WEIGHT, optax.sgd(0.1), config
    with pytest.raises(ValueError, match=error):
        zinf.initialize(*arguments, model_state=STATE, state_rules=rules)


def test_modules_say_the_rules_of_their_own_variables_and_count_keys_once():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = nnx.Linear(4, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.num_rows = nnx.Variable(jnp.int32(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.num_rows[...] += len(x)
            return self.dropout(self.layer(x))

    def module_loss(model: Model, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model(batch)))

    config = {"gradient_accumulation_steps": 4}
    arguments = module_loss, lambda: Model(nnx.Rngs(0)), optax.sgd(0.1), config
    rules = {"num_rows": "sum"}
    with closing(zinf.nnx.initialize(*arguments, state_rules=rules)) as engine:
        engine.step(BATCH)
        found = engine.model_state()
    assert found["num_rows"] == len(BATCH)
    assert found["dropout"]["rngs"]["count"] == 1
    with pytest.raises(ValueError, match="'num_rows' is int32"):
        zinf.nnx.initialize(*arguments)


def test_a_batch_leaf_that_is_no_set_of_samples_is_named_if_the_batch_is_divided():
    """Class weights would be cut in two beside the samples."""

    def weighed(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(batch["x"] @ params) * batch["weights"][None])

    batch = {"x": BATCH, "weights": np.ones(4, np.float32)}
    whole = {"gradient_accumulation_steps": 1}
    with closing(zinf.initialize(weighed, WEIGHT, optax.sgd(0.1), whole)) as engine:
        engine.step(batch)
    halves = {"gradient_accumulation_steps": 2}
    with closing(zinf.initialize(weighed, WEIGHT, optax.sgd(0.1), halves)) as engine:
        with pytest.raises(ValueError, match=r"8 samples.*'weights' \[4\]"):
            engine.step(batch)
