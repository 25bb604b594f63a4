"""A loss that compares layers with changed copies of themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.adapt.small import BATCH, DIM, normal
from zinf.adapt.distill import SHIFT, distilling, layer_name
from zinf.adapt.record import contractions_of

NAMES = ("0", "1")
PATHS = [f"layers/{n}/{x}" for n in NAMES for x in ("up", "down")]


def params():
    shapes = {"up": (24, DIM), "down": (DIM, 24)}
    layers = {
        n: {x: normal(i, *shape) for i, (x, shape) in enumerate(shapes.items())}
        for n in NAMES
    }
    return {"layers": layers, "head": normal(9, 5, DIM)}


def layer(own, x):
    return x + jnp.tanh(x @ own["up"].T) @ own["down"].T


def loss(params, batch, *, uses=lambda x: x):
    x = batch["x"]
    for name in NAMES:
        x = uses(layer(params["layers"][name], x))
    return jnp.mean(x @ params["head"].T)


def made(function, paths):
    found = contractions_of(function, params(), batch=BATCH)
    changes = dict.fromkeys(paths, lambda weight, shift: 0.5 * weight + shift)
    return distilling(function, params, found, changes)


@pytest.mark.parametrize("paths", [PATHS, PATHS[:1], PATHS[1:3]])
def test_each_layer_is_compared_for_the_outputs_of_plain_layers_before(paths):
    """And its gradient is that of its own error, as if it were alone."""
    adapted = made(loss, paths)
    given = adapted.params()
    (total, errors), grads = jax.value_and_grad(adapted.loss_fn, has_aux=True)(
        given, BATCH
    )

    def error(shifts, name, x):
        own = given["base"]["layers"][name]
        student = {
            key: 0.5 * own[key] + shifts[f"layers/{name}/{key}"][SHIFT]
            if f"layers/{name}/{key}" in paths
            else own[key]
            for key in own
        }
        gap = layer(student, x) - layer(own, x)
        return jnp.sum(gap * gap)

    x, wanted = BATCH["x"], 0.0
    for name in NAMES:
        if f"layers/{name}" in errors:
            one, pull = jax.value_and_grad(error)(given["adapter"], name, x)
            wanted += one
            np.testing.assert_allclose(
                errors[f"layers/{name}"], one / x.size, rtol=1e-6
            )
            for path in (p for p in paths if p.startswith(f"layers/{name}")):
                found = grads["adapter"][path][SHIFT]
                assert (
                    jnp.abs(found - pull[path][SHIFT]).max()
                    < 1e-6 * jnp.abs(found).max()
                )
        x = layer(given["base"]["layers"][name], x)
    np.testing.assert_allclose(total, wanted, rtol=1e-6)
    assert {layer_name(p) for p in paths} == errors.keys()


def test_a_layer_that_nothing_reads_smoothly_is_refused_by_name():
    chosen = made(
        lambda *a: loss(*a, uses=lambda x: jnp.argmax(x) * jnp.ones_like(x)), PATHS[:2]
    )
    with pytest.raises(ValueError, match="layers/0 computes of layers/0/up"):
        jax.make_jaxpr(chosen.loss_fn)(chosen.params(), BATCH)


def test_layers_are_named_by_the_first_number():
    names = {
        "model.layers.3.mlp.up_proj.weight": "model.layers.3",
        "h/11/attn/1/kernel": "h/11",
        "model.project_in.weight": "model.project_in",
    }
    assert {path: layer_name(path) for path in names} == names
