"""A batch of another shape is planned for anew, or refused; the old one goes on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.marks import slow_except
from tests.robustness.small import (
    BATCH,
    DIM,
    content,
    draw,
    expect_at_rest,
    init,
    loss_fn,
    on_nvme,
)
from zinf.plan import InfeasibleError

FUSED = {"execution": "fused"}
STREAMED = {"execution": "streamed", "segment": {"remat": "always"}}


def reference(loss, batches):
    """Losses and parameters of plain JAX."""
    tx = optax.adam(1e-2)
    params = init()
    state, losses = tx.init(params), []
    for batch in batches:
        loss_now, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss_now))
    return losses, params


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "config", slow_except([FUSED, STREAMED], [FUSED, STREAMED, "nvme"]), ids=str
)
def test_a_batch_of_another_shape_is_planned_for(config, start, tmp_path):
    config = on_nvme(tmp_path / "nvme") if config == "nvme" else config
    engine = start(config)
    sizes = [BATCH, 2 * BATCH, BATCH, 3, 2 * BATCH]
    batches = [draw(i, size) for i, size in enumerate(sizes)]
    losses = []
    for batch in batches:
        losses.append(engine.step(batch)["loss"])
        expect_at_rest(engine)
    expected, params = reference(loss_fn, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    chex.assert_trees_all_close(engine.params(), params, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", slow_except([STREAMED], [FUSED, STREAMED]), ids=str)
def test_constants_that_depend_on_the_shape_are_those_of_the_batch(config, start):
    def loss(params, batch):
        # Made by NumPy, so they are constants of the traced program.
        size = len(batch["x"])
        mask = np.tril(np.ones((size, size), np.float32)) / size
        scale = np.full(DIM, size, np.float32)
        return loss_fn(params, {**batch, "x": (mask @ batch["x"]) * scale[None]})

    engine = start(config, loss=loss)
    batches = [draw(i, size) for i, size in enumerate([4, 8, 4, 8])]
    losses = []
    for batch in batches:
        losses.append(engine.step(batch)["loss"])
        expect_at_rest(engine)
        plan, ledger = engine.plan, engine.stores.device.ledger
        assert ledger.peak_bytes <= plan.peak_bytes["device"]
    np.testing.assert_allclose(losses, reference(loss, batches)[0], rtol=1e-5)


@pytest.mark.parametrize("config", slow_except([STREAMED], [FUSED, STREAMED]), ids=str)
def test_a_batch_that_exceeds_the_budget_is_refused_with_numbers(config, start):
    fitting = start(config, batch=draw())
    # Also on the host, where the batch itself lies.
    budget = fitting.plan.peak_bytes["device"] + 500
    engine = start({**config, "memory": {"device": budget, "host": 16_000}})
    engine.step(draw(1))
    before = content(engine)
    too_many = draw(2, 4096)
    with pytest.raises(InfeasibleError) as caught:
        engine.step(too_many)
    message = str(caught.value)
    capacity = engine.plan.capacity_bytes
    short = caught.value.shortages
    for tier, shortage in short.items():
        assert f"{capacity[tier]:,}" in message
        assert f"{shortage.needed_bytes:,}" in message
    assert "memory." in message
    assert content(engine) == before
    expect_at_rest(engine)
    fitting.step(draw(1))
    assert engine.step(draw(3))["loss"] == fitting.step(draw(3))["loss"]
    chex.assert_trees_all_equal(engine.params(), fitting.params(), strict=True)


def test_shapes_are_enough_to_plan_and_to_place(start):
    engine = start(STREAMED, batch=jax.eval_shape(draw))
    plan = engine.plan
    assert engine.is_placed
    engine.step(draw())
    assert engine.plan is plan


def test_the_plan_is_that_of_the_latest_batch(start):
    engine = start(STREAMED)
    engine.step(draw())
    small = engine.plan
    engine.step(draw(0, 2 * BATCH))
    large = engine.plan
    assert large.peak_bytes["host"] > small.peak_bytes["host"]
    engine.step(draw())
    assert engine.plan is small


@pytest.mark.parametrize("config", slow_except([STREAMED], [FUSED, STREAMED]), ids=str)
def test_an_evaluation_may_have_another_shape_between_steps(config, start):
    engine, undisturbed = start(config), start(config)
    for i in range(3):
        found, expected = (e.step(draw(i))["loss"] for e in (engine, undisturbed))
        assert found == expected
        batch = draw(10 + i, 2)
        plain = float(jax.jit(loss_fn)(engine.params(), batch))
        np.testing.assert_allclose(engine.evaluate(batch), plain, rtol=1e-5)
        expect_at_rest(engine)


@pytest.mark.parametrize(
    ("config", "num_traces"), [(FUSED, 3), (STREAMED, 1)], ids=["fused", "streamed"]
)
def test_a_shape_that_was_seen_before_is_not_traced_again(config, num_traces, start):
    """A fused engine looks at the loss, compiles a step and compiles an evaluation."""
    sizes = [BATCH, 2 * BATCH]
    chex.clear_trace_counter()
    engine = start(
        config, loss=chex.assert_max_traces(loss_fn, num_traces * len(sizes))
    )
    for i in range(3):
        for size in sizes:
            engine.step(draw(i, size))
            engine.evaluate(draw(i, size))


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused(start):
    engine = start({"gradient_accumulation_steps": 3})
    with pytest.raises(ValueError, match=r"'x' has shape \[4, 8\].*= 3"):
        engine.step(draw())
    assert engine.step(draw(0, 6))["step"] == 1


@pytest.mark.parametrize("leaf", ["text", np.array(["a", "b"]), object()])
def test_a_batch_leaf_that_is_no_array_is_refused(leaf, start):
    engine = start()
    with pytest.raises(ValueError, match="batch leaf 'note' is .*not an array"):
        engine.step({**draw(), "note": leaf})
    with pytest.raises(ValueError, match="batch leaf 'note' is .*not an array"):
        start(batch={**draw(), "note": leaf})
    assert engine.step(draw())["step"] == 1


def test_python_numbers_and_jax_arrays_are_batch_leaves(start):
    def loss(params, batch):
        return loss_fn(params, batch) * batch["weight"]

    engine = start(loss=loss, config=STREAMED)
    batch = {**jax.tree.map(jnp.asarray, draw()), "weight": 2.0}
    expected = 2 * loss_fn(init(), draw())
    np.testing.assert_allclose(engine.step(batch)["loss"], expected, rtol=1e-5)
