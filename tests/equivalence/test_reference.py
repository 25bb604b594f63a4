"""Every way of execution computes what plain JAX and optax compute (`zinf.verify`)."""

from itertools import product

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence import model_state
from tests.equivalence.models import EQUINOX, LINEN, MODELS, NNX, PYTREE
from tests.equivalence.training import (
    BOTH,
    FUSED,
    OFFLOADED,
    ON_DEVICE,
    ON_NVME,
    OPTIMIZERS,
    SETTINGS,
    Setting,
)

# Float32 sums of some thousand terms in another order differ by about 1e-6 of the
# largest: 1e-5 leaves room for a network's depth.
TOLERANCE = 1e-5
STREAMED = ON_DEVICE
WAYS = (STREAMED, FUSED, OFFLOADED)
slow = pytest.mark.slow
FAST = [
    (PYTREE, BOTH, STREAMED, "sgd"),
    (PYTREE, "plain", FUSED, "adam"),
    (PYTREE, BOTH, OFFLOADED, "sgd"),
]
CASES = FAST + [
    *[(model, BOTH, way, "sgd") for model in (LINEN, NNX) for way in WAYS],
    (EQUINOX, BOTH, OFFLOADED, "sgd"),
    (EQUINOX, "accumulation", STREAMED, "adam"),
    (EQUINOX, "clipping", FUSED, "adam"),
    *[(PYTREE, "plain", w, o) for w, o in product(WAYS, ("lamb", "adafactor", "muon"))],
]


@pytest.mark.parametrize(
    ("model", "name", "way", "optimizer"),
    [pytest.param(*case, marks=() if case in FAST else slow) for case in CASES],
)
def test_losses_gradients_and_parameters_are_those_of_plain_jax(
    model, name, way, optimizer
):
    """Sgd scales no rounding error up, as the others do with small gradients."""
    config = Setting(way, name).config(model, "")
    batch = model.batches(1, Setting(way, name).num_microbatches)[0]
    tx = OPTIMIZERS[optimizer]
    found = zinf.verify(model.loss, model.init, tx, config, batch=batch)
    assert found, repr(found)
    assert found.execution == (way if isinstance(way, str) else "streamed")
    checks = [*found.loss_checks, *(leaf.gradient for leaf in found.leaves)]
    checks += [leaf.param for leaf in found.leaves if optimizer == "sgd"]
    for check in checks:
        assert check.largest > 0
        assert check.difference <= TOLERANCE * check.largest


@slow
@pytest.mark.parametrize("name", ["bf16 clipping", "fp16 accumulation"])
@pytest.mark.parametrize("way", WAYS)
def test_16_bit_steps_are_those_of_plain_jax(way, name):
    """In float16 the first steps overflow, and are skipped."""
    config = Setting(way, name).config(PYTREE, "")
    batch = PYTREE.batches(1, Setting(way, name).num_microbatches)[0]
    tx = OPTIMIZERS["adam"]
    found = zinf.verify(PYTREE.loss, PYTREE.init, tx, config, batch=batch, num_steps=6)
    assert found, repr(found)
    losses = [loss for loss, _ in found.losses]
    assert (losses[0] == losses[1]) == ("fp16" in name)


@pytest.mark.parametrize("way", [FUSED, STREAMED, OFFLOADED])
def test_the_norm_is_that_of_the_mean_gradient_before_clipping(way):
    batch = PYTREE.batches(1, 2)[0]
    params = PYTREE.init()
    grads = jax.grad(PYTREE.loss)(params, batch)
    config = Setting(way, BOTH).config(PYTREE, "")
    with PYTREE.start(OPTIMIZERS["sgd"], config) as engine:
        norm = engine.step(batch)["grad_norm"]
    np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=TOLERANCE)


@slow
@pytest.mark.parametrize("place", [ON_NVME, FUSED])
def test_model_state_is_that_of_plain_jax(place, tmp_path):
    """Statistics are averaged over microbatches; counts and keys advance once."""
    model = model_state.NORMED
    config = Setting(place, "accumulation").config(model, str(tmp_path))
    found = zinf.verify(
        model.loss,
        model.init,
        OPTIMIZERS["sgd"],
        config,
        batch=model.batches(1, 2)[0],
        **model_state.OPTIONS,
    )
    assert found, repr(found)
    leaves = {leaf.path: leaf for leaf in found.leaves}
    assert leaves["model_state/layers/0/mean"].param.largest > 0
    assert leaves["model_state/key"].agrees


def test_every_setting_and_model_occurs():
    assert {case[0] for case in CASES} == {*MODELS}
    assert {case[1] for case in CASES} >= {"plain", "accumulation", "clipping", BOTH}
    assert {case[3] for case in CASES} == OPTIMIZERS.keys() - {"slow adam"}
    assert {"bf16 clipping", "fp16 accumulation"} <= SETTINGS.keys()
