"""The mean loss of a step weighs tokens: microbatches and devices change no mean."""

from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.weighted import (
    COUNTS,
    ROWS,
    RTOL,
    STREAMED,
    TOKENS,
    WEIGHTS,
    batch,
    loss,
    whole_mean,
)

EXPECTED_LOSS, EXPECTED_GRADIENT = jax.value_and_grad(whole_mean)(WEIGHTS, batch())


def step(
    loss_fn: Any, num_microbatches: int, config: Any, num_devices: int = 1
) -> tuple[float, Any]:
    """The loss of one step, and its gradient by SGD with a rate of 1."""
    settings = {"gradient_accumulation_steps": num_microbatches} | config
    mesh = zinf.make_mesh(jax.devices()[:num_devices])
    arguments = loss_fn, WEIGHTS, optax.sgd(1.0), settings
    with closing(zinf.initialize(*arguments, mesh=mesh)) as engine:
        found = engine.step(batch())["loss"]
        new = engine.params()
    return found, jax.tree.map(lambda old, x: old - np.asarray(x), WEIGHTS, new)


CASES = [
    (1, STREAMED, 1),
    (2, {"execution": "fused"}, 1),
    (4, STREAMED, 1),
    (8, {"execution": "offloaded"}, 1),
    (1, STREAMED | {"zero_optimization": {"stage": 3}}, 4),
    (2, STREAMED | {"zero_optimization": {"stage": 3}}, 4),
    (4, {"execution": "fused"}, 4),
    (8, STREAMED | {"zero_optimization": {"stage": 3}}, 4),
    (2, {"execution": "fused", "zero_optimization": {"stage": 2}}, 4),
    (4, STREAMED | {"gradient_clipping": 1e6}, 1),
]


@pytest.mark.parametrize(("num_microbatches", "config", "num_devices"), CASES)
def test_every_token_of_a_step_counts_alike(num_microbatches, config, num_devices):
    found, gradient = step(loss, num_microbatches, config, num_devices)
    np.testing.assert_allclose(found, EXPECTED_LOSS, rtol=RTOL)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        gradient,
        EXPECTED_GRADIENT,
    )


def test_the_old_way_is_the_mean_of_the_means_of_microbatches():
    found, _ = step(loss, 4, STREAMED | {"loss_average": "microbatches"})
    parts = [jax.tree.map(lambda x: x[i : i + 8], batch()) for i in (0, 8, 16, 24)]  # noqa: B023
    means = [whole_mean(WEIGHTS, part) for part in parts]
    np.testing.assert_allclose(found, np.mean(means), rtol=RTOL)
    assert abs(found - EXPECTED_LOSS) > 0.01


@pytest.mark.parametrize("execution", ["streamed", "fused"])
@pytest.mark.parametrize("apart", [False, True])
def test_an_evaluation_does_not_depend_on_its_batches(execution, apart):
    """With the training loss, and with one of its own."""
    other = (lambda params, batch: loss(params, batch)) if apart else None
    config = {"execution": execution, "gradient_accumulation_steps": 2}
    arguments = loss, WEIGHTS, optax.sgd(1.0), config
    engine = zinf.initialize(*arguments, eval_loss_fn=other, batch=batch())
    with closing(engine):
        for size in (32, 16, 4):
            parts = [
                jax.tree.map(lambda x: x[i : i + size], batch())  # noqa: B023
                for i in range(0, ROWS, size)
            ]
            losses = [engine.evaluate_weighted(part) for part in parts]
            total, weight = (
                sum(getattr(x, name) for x in losses) for name in ("total", "weight")
            )
            assert weight == COUNTS.sum()
            np.testing.assert_allclose(total / weight, EXPECTED_LOSS, rtol=RTOL)
        assert engine.evaluate(batch()) == pytest.approx(float(EXPECTED_LOSS))


def test_a_mean_is_weighed_by_its_samples():
    engine = zinf.initialize(whole_mean, WEIGHTS, optax.sgd(1.0), batch=batch())
    with closing(engine):
        found = engine.evaluate_weighted(batch())
    assert found.weight == ROWS
    np.testing.assert_allclose(found.mean, EXPECTED_LOSS, rtol=RTOL)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_the_weight_may_depend_on_shapes_alone(num_microbatches):
    """As the number of entries of a regression."""

    def mean_of_all(params: Any, batch: Any) -> zinf.Weighted:
        return zinf.Weighted(loss(params, batch).total, jnp.float32(batch["y"].size))

    found, _ = step(mean_of_all, num_microbatches, STREAMED)
    expected = loss(WEIGHTS, batch()).total / (ROWS * TOKENS * 3)
    np.testing.assert_allclose(found, expected, rtol=RTOL)


def test_the_weight_may_come_with_aux_from_a_checkpointed_part_and_a_key():
    """`jax.checkpoint` reads parameters too; only what the weight needs counts."""

    def drawn(params: Any, batch: Any, key: jax.Array) -> Any:
        mask = jax.random.bernoulli(key, 0.5, batch["mask"].shape)
        batch = batch | {"mask": batch["mask"] * mask}
        return jax.checkpoint(loss)(params, batch), {"rows": jnp.int32(ROWS)}

    key = jax.random.key(5)
    config = STREAMED | {"gradient_accumulation_steps": 2}
    arguments = drawn, WEIGHTS, optax.sgd(1.0), config
    verified = zinf.verify(*arguments, batch=batch(), has_aux=True, rng=key)
    assert verified.agrees, str(verified)


@pytest.mark.parametrize("execution", ["streamed", "fused"])
def test_plain_jax_agrees_on_a_weighted_loss(execution):
    config = {"execution": execution, "gradient_accumulation_steps": 4}
    verified = zinf.verify(loss, WEIGHTS, optax.adam(1e-2), config, batch=batch())
    assert verified.agrees, str(verified)


def test_a_weight_that_depends_on_parameters_is_refused_by_name():
    def wrong(params: Any, batch: Any) -> zinf.Weighted:
        return zinf.Weighted(whole_mean(params, batch), jnp.sum(params["first"]))

    with pytest.raises(ValueError, match="depends on the parameters first"):
        zinf.initialize(wrong, WEIGHTS, optax.sgd(1.0), batch=batch())


def test_a_batch_without_weight_is_refused_before_anything_is_updated():
    empty = batch() | {"mask": np.zeros((ROWS, TOKENS), np.float32)}
    with closing(zinf.initialize(loss, WEIGHTS, optax.sgd(1.0), STREAMED)) as engine:
        with pytest.raises(ValueError, match="weight of the batch's loss is 0"):
            engine.step(empty)
        jax.tree.map(np.testing.assert_array_equal, engine.params(), WEIGHTS)
        engine.step(batch())
