"""What a chain of optax does with all gradients, or the loss, is done as optax does it.

A leading `clip_by_global_norm`, and `reduce_on_plateau`, which reads the loss.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import zinf
from tests.equivalence.meshes import batches, config, init, loss
from tests.equivalence.training import BOUND, mesh_of

# Enough for the losses to fall and to rise.
STEPS = 6
# Gradients so small that the 1e-6 which torch adds to their norm would halve them.
SMALL = 2.0**-20
TX = optax.chain(
    optax.clip_by_global_norm(0.5 * SMALL),
    optax.sgd(0.5 / SMALL, momentum=0.5),
    # The losses rise and fall, so the scale is halved after a few.
    optax.contrib.reduce_on_plateau(patience=1, factor=0.5, rtol=0.3),
)
slow = pytest.mark.slow


def small_loss(params: Any, batch: Any) -> jax.Array:
    return SMALL * loss(params, batch)


@cache
def in_optax() -> tuple[list[float], float]:
    """The losses, and the scale that the plateau left."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(small_loss)(params, batch)
        updates, state = TX.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, value

    params = init()
    state, losses = TX.init(params), []
    for batch in batches(STEPS):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, float(state[-1].scale)


@pytest.mark.parametrize(
    ("on", "stage", "tier"),
    [
        ("1", 3, "nvme"),
        pytest.param("1", 3, "fused", marks=slow),
        pytest.param("2x4", 1, "fused", marks=slow),
        pytest.param("4", 3, "host", marks=slow),
    ],
)
def test_clipping_and_a_plateau_are_those_of_optax_and_resume(
    on, stage, tier, tmp_path
):
    losses, scale = in_optax()
    assert scale < 1, "the scale has to change, or nothing is tested"

    def start(number: int) -> zinf.Engine:
        settings = config(stage, tier, str(tmp_path / f"nvme {number}"))
        del settings["gradient_clipping"]
        return zinf.initialize(small_loss, init, TX, settings, mesh=mesh_of(on))

    given = batches(STEPS)
    with start(0) as engine:
        found = [engine.step(batch)["loss"] for batch in given[:3]]
        engine.save(tmp_path / "saved")
        found += [engine.step(batch)["loss"] for batch in given[3:]]
        shared = {s["name"]: s["value"] for s in engine.scalars()["shared"]}
    np.testing.assert_allclose(found, losses, rtol=BOUND)
    assert shared["2/scale"] == scale
    with start(1) as engine:
        engine.restore(tmp_path / "saved")
        assert [engine.step(batch)["loss"] for batch in given[3:]] == found[3:]


LABELS = {"up": "first", "up_bias": "first", "mid": "rest", "mid_bias": "rest"}
LABELS |= {"out": "first", "scale": "rest"}
RULES = {
    "first": optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.5)),
    "rest": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05)),
}
# Below the norms of all gradients and of each part's, so that every one is clipped.
APART = {
    "parts": optax.partition(RULES, LABELS),
    "parts after all": optax.chain(
        optax.clip_by_global_norm(0.3), optax.partition(RULES, LABELS)
    ),
    "some": optax.chain(
        optax.masked(RULES["first"], {k: x == "first" for k, x in LABELS.items()}),
        optax.masked(optax.sgd(0.1), {k: x == "rest" for k, x in LABELS.items()}),
    ),
    # The gradient is read clipped in the first two updates, and as it is afterwards.
    "at first": optax.chain(
        optax.conditionally_transform(
            optax.clip_by_global_norm(0.2), lambda count: count < 2
        ),
        optax.sgd(0.05),
    ),
}
APART_CASES = [
    ("parts", "1", 3, "fused"),
    ("parts after all", "1", 3, "nvme"),
    ("some", "2x4", 1, "fused"),
    ("at first", "1", 3, "host"),
    ("parts", "4", 3, "host"),
    ("parts after all", "2", 2, "device"),
]


@pytest.mark.parametrize(
    ("name", "on", "stage", "tier"),
    [pytest.param(*case, marks=() if case[1] == "1" else slow) for case in APART_CASES],
)
def test_leaves_that_are_clipped_apart_are_clipped_where_optax_does(
    name, on, stage, tier, tmp_path
):
    tx, given = APART[name], batches(4)
    params = init()
    state, losses = tx.init(params), []
    for batch in given:
        value, grads = jax.value_and_grad(loss)(params, batch)
        norms = [
            optax.tree.norm({k: x for k, x in grads.items() if LABELS[k] == label})
            for label in RULES
        ]
        assert norms[0] > 0.2 and norms[1] > 0.1, "nothing would be clipped"
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    settings = config(stage, tier, str(tmp_path))
    del settings["gradient_clipping"]
    with zinf.initialize(loss, init, tx, settings, mesh=mesh_of(on)) as engine:
        found = [engine.step(batch) for batch in given]
        trained = engine.params()
    np.testing.assert_allclose([m["loss"] for m in found], losses, rtol=BOUND)
    for path, weights in params.items():
        np.testing.assert_allclose(trained[path], weights, rtol=1e-5, atol=1e-6)


def test_an_offloaded_step_does_not_clip_apart_and_says_so():
    settings = {"execution": "offloaded"}
    with (
        pytest.raises(NotImplementedError, match="norm of their own"),
        zinf.initialize(loss, init, APART["parts"], settings) as engine,
    ):
        engine.prepare(batches(1)[0])


def test_a_loss_in_bfloat16_reaches_the_optimizer_as_float32():
    def rounded(params: Any, batch: Any) -> jax.Array:
        return loss(params, batch).astype(jnp.bfloat16)

    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    settings = {"execution": "streamed"}
    with zinf.initialize(rounded, init, plateau, settings) as engine:
        found = engine.step(batches(1)[0])["loss"]
        shared = {s["name"]: s["value"] for s in engine.scalars()["shared"]}
    assert shared["1/best_value"] == found
