"""Which parameters can take the inverse of the scales of a layer's inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.adapt.small import BATCH, DIM, normal
from zinf.adapt.scaling import shared_inputs

NAMES = ("norm", "shift", "gate", "up", "shift_up", "down", "head", "square")


def params():
    shapes = {"gate": (24, DIM), "up": (24, DIM), "down": (DIM, 24), "head": (5, DIM)}
    shapes |= {"square": (5, DIM), "norm": (DIM,), "shift": (DIM,), "shift_up": (24,)}
    return {name: normal(n, *shapes[name]) for n, name in enumerate(NAMES)}


def normed(params, x):
    x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return params["norm"][None] * x + params["shift"][None]


def loss(params, batch, *, also=lambda params, x, up: 0.0):
    """A gated layer between a norm and a head, and what else reads its values."""
    x = jnp.tanh(batch["x"])
    given = normed(params, x)
    up = given @ params["up"].T + params["shift_up"][None]
    inner = jax.nn.silu(given @ params["gate"].T) * up
    outer = jnp.tanh(x + inner @ params["down"].T)
    return jnp.mean(outer @ params["head"].T) + also(params, given, up)


GATED = {("up", "gate"): {"norm": 0, "shift": 0}}
DOWN = {("down",): {"up": 0, "shift_up": 0}}


def found(function):
    shared = shared_inputs(function, params(), batch=BATCH)
    return {each.layers: dict(each.factors) for each in shared}


def test_a_loss_is_the_same_with_scales_that_its_factors_take():
    shared = shared_inputs(loss, params(), batch=BATCH)
    assert found(loss) == GATED | DOWN
    changed, wanted = params(), loss(params(), BATCH)
    for number, each in enumerate(shared):
        inputs = changed[each.layers[0]].shape[1]
        scales = jnp.exp(jax.random.normal(jax.random.key(number), (inputs,)))
        for path in each.layers:
            changed[path] *= scales[None]
        for path, dim in each.factors.items():
            assert dim == 0
            value = changed[path]
            changed[path] = value / scales.reshape(-1, *[1] * (value.ndim - 1))
    np.testing.assert_allclose(loss(changed, BATCH), wanted, rtol=1e-5)
    assert not np.allclose(changed["up"], params()["up"])


@pytest.mark.parametrize(
    ("also", "wanted"),
    [
        # Other readers of the inputs, of a factor, and of a layer's weight.
        (lambda params, x, up: jnp.sum(x), DOWN),
        (lambda params, x, up: jnp.sum(params["norm"]), DOWN),
        (lambda params, x, up: jnp.sum(params["gate"]), DOWN),
        (lambda params, x, up: jnp.max(up), GATED),
        (lambda params, x, up: jnp.sum(up * params["shift_up"][None]), GATED),
        # The square of an input has its factor twice.
        (lambda params, x, up: jnp.sum(x * x @ params["square"].T), DOWN),
        # Readers of other values.
        (lambda params, x, up: jnp.sum(params["head"]), GATED | DOWN),
    ],
)
def test_what_something_else_reads_is_left_out(also, wanted):
    assert found(lambda params, batch: loss(params, batch, also=also)) == wanted
