"""Sums of squares are those of numpy in double precision where float32 overflows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.optim.squares import added, combined, root, squares

LARGEST = float(np.finfo(np.float32).max)
RANDOM = np.random.default_rng(0).standard_normal(5000)


@jax.jit
def coded(arrays):
    return combined([squares(x) for x in arrays])


@pytest.mark.parametrize(
    ("arrays", "overflows"),
    [
        ([], False),
        ([[3.0], [4.0]], False),
        ([RANDOM, 1e-20 * RANDOM], False),
        ([1e18 * RANDOM[:9]], False),
        ([2e25 * RANDOM], True),
        # Each square is finite, and their sum is not.
        ([[1.5e19] * 2], True),
        ([[1.5e19], [1.5e19]], True),
        ([[1.5e19, 1.0, -3.0e30], [[1e30]], 5.0], True),
        ([RANDOM, 2e25 * RANDOM], True),
        ([[LARGEST] * 100], True),
    ],
)
def test_the_norm_of_finite_numbers_is_finite(arrays, overflows):
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    code = coded(arrays)
    wide = [np.asarray(x, np.float64) for x in arrays]
    expected = float(sum(np.sum(np.square(x)) for x in wide))
    assert (code < 0) == overflows
    if not overflows:
        plain = [jnp.sum(jnp.square(x)) for x in arrays]
        assert code == (jnp.sum(jnp.stack(plain)) if plain else 0)
    np.testing.assert_allclose(added([float(code)]), expected, rtol=1e-5)
    np.testing.assert_allclose(
        added(map(float, map(coded, ([x] for x in arrays)))), expected, rtol=1e-5
    )
    if expected**0.5 < LARGEST:
        np.testing.assert_allclose(root(code, jnp), expected**0.5, rtol=1e-5)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(value):
    code = coded([jnp.asarray([1.0, value], jnp.float32), jnp.ones(3) * 2e25])
    assert not jnp.isfinite(root(code, jnp))
    assert not np.isfinite(np.sqrt(added([1.0, float(code)])))
