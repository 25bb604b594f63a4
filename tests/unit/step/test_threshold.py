"""What the persistence threshold keeps off a drive is said before training starts."""

import logging

import jax
import jax.numpy as jnp
import optax
import pytest

import zinf
from zinf.core.program import Tier

DIM = 8
NUM_LAYERS = 2
WEIGHT_BYTES = 4 * DIM * DIM
BATCH = jax.ShapeDtypeStruct((2, DIM), jnp.float32)


def init():
    return [jnp.eye(DIM)] * NUM_LAYERS


def loss_fn(params, x):
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


@pytest.fixture
def planned(caplog, tmp_path):
    """Plans with what is asked for on nvme: whether some is, and what was said."""

    def plan(*sections, zero=None, **config):
        offload = {"device": "nvme", "nvme_path": str(tmp_path)}
        config["zero_optimization"] = (zero or {}) | dict.fromkeys(sections, offload)
        tx = optax.adam(1e-2)
        with caplog.at_level(logging.WARNING, logger="zinf"):
            made = zinf.plan_only(loss_fn, init, tx, config, batch=BATCH)
        said = [r.getMessage() for r in caplog.records if r.name.startswith("zinf")]
        return Tier.NVME in made.homes.values(), said

    return plan


def test_a_threshold_that_keeps_everything_off_nvme_is_said_in_one_line(planned):
    is_there, (line,) = planned("offload_param", "offload_optimizer")
    assert not is_there
    # Weights with two moments each; Adam's count is no array of a parameter.
    assert f"all {3 * NUM_LAYERS} arrays are smaller than persistence_threshold" in line
    assert f"32,768 bytes; the largest has {WEIGHT_BYTES}" in line
    assert "offload_param and offload_optimizer" in line
    assert "\n" not in line


def test_the_key_that_set_the_threshold_is_named(planned):
    elements = {"stage3_param_persistence_threshold": DIM * DIM + 1}
    is_there, (line,) = planned("offload_param", zero=elements)
    assert not is_there
    assert "Lower zero_optimization.stage3_param_persistence_threshold" in line
    assert f"all {NUM_LAYERS} arrays" in line


def test_a_threshold_that_keeps_nothing_off_nvme_is_not_mentioned(planned):
    limit = {"persistence_threshold": WEIGHT_BYTES}
    assert planned("offload_param", **limit) == (True, [])
