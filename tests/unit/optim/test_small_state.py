"""Moments in bfloat16 and in 8 bits: what they keep, and that they train as Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.core.optim.separate import separate
from zinf.core.optim.transforms.small_state import (
    BLOCK,
    QuantizedMoment,
    code_book,
    scale_by_adam_8bit,
    scale_by_adam_bfloat16,
)

DIM = 72  # 5184 entries: more than MIN_NUMEL_8BIT, and no whole number of blocks
RULES = {"bfloat16": scale_by_adam_bfloat16, "8bit": scale_by_adam_8bit}
# Bytes of both moments. 8 bits: 2 codes, and 2 float32 scales for 21 blocks of 256.
BYTES = {"bfloat16": 4, "8bit": (2 * 21 * BLOCK + 2 * 4 * 21) / DIM**2}


def gradients(seed: int) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(jax.random.key(seed), (DIM, DIM))}


@pytest.mark.parametrize("name", RULES)
def test_state_takes_as_many_bytes_as_it_says(name):
    """Moments in bfloat16 are updated in blocks, and those in 8 bits whole."""
    tx = RULES[name]()
    state = tx.init(gradients(0))
    nbytes = sum(x.nbytes for x in jax.tree.leaves((state.mu, state.nu)))
    assert nbytes / DIM**2 == pytest.approx(BYTES[name])
    (leaf,) = separate(tx, gradients(0)).leaves
    assert leaf.is_elementwise == (name == "bfloat16")


def test_a_second_moment_that_barely_changes_is_right_on_average():
    """Rounded to the nearest, 0.999 of a bfloat16 is the same bfloat16."""
    rule = scale_by_adam_bfloat16(b2=0.999)
    params = gradients(0)
    state = rule.init(params)
    first = (1 + params["w"] ** 2).astype(jnp.bfloat16)
    state = state._replace(nu={"w": first}, count=jnp.int32(10))
    exact = np.asarray(first, np.float64)
    update = jax.jit(rule.update)
    for seed in range(100):
        # Gradients that differ: equal entries would be rounded with equal noise.
        grad = {"w": gradients(seed)["w"] / 4}
        _, state = update(grad, state)
        exact = 0.999 * exact + 0.001 * np.asarray(grad["w"], np.float64) ** 2
    found = np.mean(np.asarray(state.nu["w"], np.float64) / exact)
    # A step's rounding error is below 2^-8, so the mean over 5184 entries of the sum
    # of 100 is within four times 2^-8 * 10 / 72 = 0.2%.
    assert found == pytest.approx(1, abs=4 * 2**-8 * 10 / 72)
    nearest = np.mean(np.asarray(first, np.float64) / exact)
    assert nearest > 1.05


def test_numbers_that_bfloat16_has_are_kept_and_infinities_stay():
    rule = scale_by_adam_bfloat16(b1=0.0, b2=0.0)
    values = jnp.array([1.0, -0.5, 0.0, np.inf, np.nan, 3.140625])
    _, state = rule.update({"w": values}, rule.init({"w": values}))
    np.testing.assert_array_equal(state.mu["w"].astype(jnp.float32), values)


def test_code_books_are_those_of_the_paper():
    signed, unsigned = code_book(is_signed=True), code_book(is_signed=False)
    for book in (signed, unsigned):
        assert book.shape == (256,) and np.all(np.diff(book) > 0)
        assert 0 in book and book[-1] == 1
    # The means of the outermost of 64 and 128 parts of [0.1, 1].
    assert signed[0] == np.float32(-(1 - 0.9 / 128))
    assert unsigned[-2] == np.float32(1 - 0.9 / 256)
    # The smallest: 10^-6 times the mean of [0.1, 1], and of its lower half.
    assert signed[signed > 0][0] == np.float32(0.55e-6)
    assert unsigned[1] == np.float32(0.325e-6)


def test_8_bit_moments_are_the_nearest_codes():
    rule = scale_by_adam_8bit(b1=0.0, b2=0.0)
    grad = gradients(1)
    _, state = rule.update(grad, rule.init(grad))
    kept = state.mu["w"]
    assert isinstance(kept, QuantizedMoment) and kept.codes.dtype == jnp.uint8
    flat = np.asarray(grad["w"]).reshape(-1)
    book = code_book(is_signed=True)
    for block in (0, len(kept.scales) - 1):
        part = flat[block * BLOCK : (block + 1) * BLOCK]
        scale = np.max(np.abs(part))
        assert kept.scales[block] == scale
        codes = np.argmin(np.abs(part[:, None] / scale - book), axis=1)
        np.testing.assert_array_equal(kept.codes[block, : part.size], codes)


@pytest.mark.parametrize("name", RULES)
def test_directions_are_near_those_of_adam(name):
    """Moments are off by 2^-8, or in 8 bits by up to a part in 16 of a small entry."""
    options = {"b1": 0.8, "b2": 0.9, "eps": 1e-4}
    rule, adam = RULES[name](**options), optax.scale_by_adam(**options)
    states = [tx.init(gradients(0)) for tx in (rule, adam)]
    for seed in range(5):
        (found, states[0]), (wanted, states[1]) = (
            jax.jit(tx.update)(gradients(seed), state)
            for tx, state in zip((rule, adam), states, strict=True)
        )
        error = jnp.linalg.norm(found["w"] - wanted["w"])
        assert error <= 0.05 * jnp.linalg.norm(wanted["w"])
