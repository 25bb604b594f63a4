"""`zinf.compressed` is its transform in the warm-up; then only its momenta move."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.core.optim.transforms.compressed import compression_of
from zinf.core.sharding import Phase
from zinf.core.sharding.local_steps import LocalSteps
from zinf.core.sharding.signs import Momenta

RATE, B1, B2, EPS, FREEZE, STEPS = 0.1, 0.9, 0.99, 1e-8, 3, 8
# The last number never has a gradient.
PARAM = jnp.array([1.0, -2.0, 3.0, 4.0])
GRADIENTS = np.random.default_rng(0).standard_normal((STEPS, 4)).astype(np.float32)
GRADIENTS[:, 3] = 0


def updates(tx):
    state, found = tx.init(PARAM), []
    for gradient in GRADIENTS:
        update, state = tx.update(jnp.asarray(gradient), state, PARAM)
        found.append(np.asarray(update))
    return found


def frozen_adam(direction):
    """What `direction(mu, nu)` makes of the moments after the warm-up."""
    mu = nu = np.zeros(4)
    found = []
    for number, g in enumerate(GRADIENTS.astype(float)):
        mu = B1 * mu + (1 - B1) * g
        if number < FREEZE:
            nu = B2 * nu + (1 - B2) * g * g
        mean, variance = mu / (1 - B1**FREEZE), nu / (1 - B2**FREEZE)
        found.append(direction(mean / (np.sqrt(variance) + EPS)))
    return found[FREEZE:]


def adam(x):
    return -RATE * x


def lamb(x):
    return -RATE * x * np.linalg.norm(PARAM) / np.linalg.norm(x)


@pytest.mark.parametrize(
    ("make", "direction"), [(optax.adam, adam), (optax.lamb, lamb)]
)
def test_moments_and_bias_corrections_stay_after_the_warm_up(make, direction):
    tx = make(RATE, B1, B2, EPS)
    found = updates(zinf.compressed(tx, freeze_step=FREEZE))
    np.testing.assert_allclose(found[:FREEZE], updates(tx)[:FREEZE], rtol=1e-6)
    np.testing.assert_allclose(found[FREEZE:], frozen_adam(direction), rtol=1e-5)


def test_a_number_without_a_second_moment_is_not_updated():
    tx = zinf.compressed(optax.adam(RATE), freeze_step=1)
    _, state = tx.update(jnp.array([1.0, 0.0]), tx.init(jnp.ones(2)), jnp.ones(2))
    update, _ = tx.update(jnp.ones(2), state, jnp.ones(2))
    assert update[0] < 0
    assert update[1] == 0


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(RATE),
        optax.nadam(RATE),
        optax.chain(optax.adam(RATE), optax.scale_by_adam()),
        optax.chain(optax.add_decayed_weights(0.1), optax.adam(RATE)),
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(RATE)),
    ],
)
def test_transforms_that_hide_gradients_from_adam_are_refused(tx):
    with pytest.raises(ValueError, match="It needs one, such as optax.adam"):
        zinf.compressed(tx, freeze_step=FREEZE)


def test_the_engine_finds_what_is_sent_in_any_chain():
    tx = zinf.compressed(optax.adam(RATE, B1), freeze_step=FREEZE)
    chained = optax.chain(tx, zinf.with_ema(0.9))
    assert compression_of(chained) == Momenta("zinf.compressed", B1, FREEZE)
    assert compression_of(optax.adam(RATE)) is None
    other = zinf.compressed(optax.adam(RATE), freeze_step=FREEZE + 1)
    with pytest.raises(ValueError, match="Keep one"):
        compression_of(optax.chain(tx, other))
    with pytest.raises(ValueError, match="at least 1"):
        zinf.compressed(optax.adam(RATE), freeze_step=0)


def deepspeed_phases(rule, num_steps):
    """The counters of DeepSpeed's ZeroOneAdam, whose first update is its step 2."""
    interval, counter, local, local_counter = 1, 0, 1, 0
    for step in range(2, num_steps + 2):
        if step <= rule.var_freeze_step + 1:
            is_plain = step % interval == 0
            counter += is_plain
            if counter == rule.var_update_scaler:
                counter, interval = 0, interval * 2
            yield Phase.PLAIN if is_plain else Phase.GRADIENTS
        else:
            yield Phase.STEPS if step % local == 0 else Phase.LOCAL
            local_counter += 1
            if local_counter == rule.local_step_scaler:
                local_counter = 0
                local = min(rule.local_step_clipper, local * 2)


@pytest.mark.parametrize("numbers", [(50, 4, 10, 4), (31, 1, 7, 6), (3, 16, 1, 16)])
def test_phases_of_0_1_adam_are_those_of_deepspeeds_counters(numbers):
    rule = LocalSteps("ZeroOneAdam", B1, EPS, 0.0, *numbers)
    found = [rule.phase(n) for n in range(120)]
    assert found == [*deepspeed_phases(rule, 120)]
    # Rates add up from one exchange to the next.
    since = 0.0
    for number in range(rule.var_freeze_step, 120):
        since += number
        rate, total, is_first = rule.rates(number, float)
        assert (rate, total) == (number, since)
        assert is_first == (since == number)
        since *= found[number] != Phase.STEPS
