"""A batch of another shape is planned for anew, or refused; the old one goes on."""

import chex
import jax
import numpy as np
import optax
import pytest

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
from tests.unit.plain import trained_in_jax
from zinf.core.plan import InfeasibleError

FUSED = {"execution": "fused"}
STREAMED = {"execution": "streamed", "segment": {"remat": "always"}}


def with_constants(params, batch):
    """A loss with constants that NumPy makes, and that depend on the shape."""
    size = len(batch["x"])
    mask = np.tril(np.ones((size, size), np.float32)) / size
    scale = np.full(DIM, size, np.float32)
    return loss_fn(params, {**batch, "x": (mask @ batch["x"]) * scale[None]})


@pytest.mark.parametrize("config", ["fused", "nvme"])
def test_each_shape_has_its_plan_and_its_constants(config, start, tmp_path):
    config = on_nvme(tmp_path) if config == "nvme" else FUSED
    engine = start(config, loss=with_constants)
    sizes = [BATCH, 2 * BATCH, BATCH, 3, 2 * BATCH]
    batches = [draw(i, size) for i, size in enumerate(sizes)]
    losses, plans = [], []
    for batch in batches:
        losses.append(engine.step(batch)["loss"])
        plans.append(engine.plan)
        expect_at_rest(engine)
        ledger = engine.stores.device.ledger
        assert ledger.peak_bytes <= engine.plan.peak_bytes["device"]
    steps = [[(batch,)] for batch in batches]
    expected, params = trained_in_jax(with_constants, init(), optax.adam(1e-2), steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    chex.assert_trees_all_close(engine.params(), params, rtol=1e-3, atol=1e-5)
    # The plan is that of the latest batch.
    assert plans[0] is plans[2] and plans[1] is plans[4]
    if config != FUSED:
        small, large, _, smallest, _ = (p.peak_bytes["device"] for p in plans)
        assert smallest < small < large


@pytest.mark.parametrize("config", [FUSED, STREAMED], ids=["fused", "streamed"])
def test_a_batch_that_exceeds_the_budget_is_refused_with_numbers(config, start):
    fitting = start(config, batch=draw())
    # Also on the host, where the batch itself lies.
    budget = fitting.plan.peak_bytes["device"] + 500
    engine = start({**config, "memory": {"device": budget, "host": 16_000}})
    engine.step(draw(1))
    before = content(engine)
    with pytest.raises(InfeasibleError) as caught:
        engine.step(draw(2, 4096))
    message = str(caught.value)
    for tier, shortage in caught.value.shortages.items():
        assert f"{engine.plan.capacity_bytes[tier]:,}" in message
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


def test_an_evaluation_may_have_another_shape_between_steps(start):
    engine, undisturbed = start(STREAMED), start(STREAMED)
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
