"""Groups of weights that vanish together, in a small LSTM."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.core.optim.transforms.group_lasso import (
    Member,
    group_lasso,
    vanished,
    without,
)

HIDDEN, INPUTS, OUTPUTS, LENGTH, RATE = 12, 3, 2, 6, 0.05
# A unit of the LSTM: its rows of the four gates, and the columns that read it.
UNITS = {
    "units": (
        HIDDEN,
        (
            Member("input", 0),
            Member("recurrent", 0),
            Member("recurrent", 1),
            Member("bias", 0),
            Member("head", 1),
        ),
    )
}


def first(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "bias": jnp.zeros(4 * HIDDEN),
        "head": 0.5 * jax.random.normal(keys[0], (OUTPUTS, HIDDEN)),
        "input": 0.5 * jax.random.normal(keys[1], (4 * HIDDEN, INPUTS)),
        "recurrent": 0.3 * jax.random.normal(keys[2], (4 * HIDDEN, HIDDEN)),
    }


def outputs(params, x_BTI):
    hidden = params["head"].shape[1]

    def cell(carry, x_BI):
        h, c = carry
        gates = x_BI @ params["input"].T + h @ params["recurrent"].T
        gates += params["bias"][None]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x_BTI.shape[0], hidden))
    (last, _), _ = jax.lax.scan(cell, (zeros, zeros), x_BTI.swapaxes(0, 1))
    return last @ params["head"].T


def loss(params, batch):
    return jnp.mean((outputs(params, batch["x"]) - batch["y"]) ** 2)


def batch():
    x = np.random.default_rng(0).normal(size=(32, LENGTH, INPUTS)).astype("float32")
    return {"x": x, "y": np.tanh(x.sum(1)[:, :OUTPUTS])}


def trained(strength, steps=1000):
    tx = optax.chain(optax.sgd(RATE, momentum=0.9), group_lasso(RATE, strength, UNITS))
    data = batch()

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params, data), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), None, length=steps)[0][0]

    return run(first())


def test_rows_and_columns_vanish_together_and_the_smaller_lstm_has_the_same_loss():
    params = trained(0.1)
    gone = vanished(params, UNITS)["units"]
    assert 0 < len(gone) < HIDDEN
    for gate in range(4):
        assert not np.any(params["recurrent"][gate * HIDDEN + gone])
        assert not np.any(params["input"][gate * HIDDEN + gone])
    assert not np.any(params["recurrent"][:, gone])
    assert not np.any(params["head"][:, gone])
    small = without(params, UNITS, {"units": gone})
    left = HIDDEN - len(gone)
    assert small["recurrent"].shape == (4 * left, left)
    assert small["head"].shape == (OUTPUTS, left)
    np.testing.assert_allclose(loss(small, batch()), loss(params, batch()), rtol=1e-6)
    # It has learned something, and without the penalty nothing vanishes.
    assert loss(params, batch()) < 0.5 * loss(first(), batch())
    assert len(vanished(trained(0.0, steps=5), UNITS)["units"]) == 0


def test_a_step_is_the_proximal_step_of_the_norms():
    params, updates = first(), jax.tree.map(jnp.ones_like, first())
    tx = group_lasso(0.1, 2.0, {"of the head": (HIDDEN, (Member("head", 1),))})
    found, _ = tx.update(updates, tx.init(params), params)
    moved = np.asarray(params["head"]) + 1
    factors = np.maximum(0, 1 - 0.2 / np.linalg.norm(moved, axis=0))
    wanted = moved * factors - np.asarray(params["head"])
    np.testing.assert_allclose(found["head"], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["bias"], np.ones(4 * HIDDEN), rtol=1e-6)


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (Member("no", 0), "there is no such parameter. There are bias, head"),
        (Member("input", 1), "no multiple of 12"),
        (Member("bias", 1), "no multiple of 12"),
    ],
)
def test_groups_that_do_not_fit_are_refused_by_name(member, words):
    tx = group_lasso(0.1, 1.0, {"units": (HIDDEN, (member,))})
    with pytest.raises(ValueError, match=words):
        tx.init(first())
