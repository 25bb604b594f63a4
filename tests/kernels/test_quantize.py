"""`quantize`: what it promises, and that the kernel gives the reference's bits."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.unit.refusals import refusals
from zinf_kernels.interpreter import interpreted
from zinf_kernels.quantize import dequantize, mosaic_gpu, quantize, reference
from zinf_kernels.quantize.blocks import LARGEST, blocks_of
from zinf_kernels.quantize.cases import cases

CASES = tuple(cases())
SEED = jnp.array([1, 2**32 - 1], jnp.uint32)
BACKENDS = {"mosaic_gpu": mosaic_gpu, "reference": reference}


def wide(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def integers(quantized) -> np.ndarray:
    """The values, unpacked in NumPy as the layout is described."""
    values = np.asarray(quantized.values)
    if quantized.bits == 8:
        return values
    lower = ((values & 15) ^ 8) - 8
    return np.concatenate([lower, values >> 4], axis=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_lost_is_within_the_stated_bound(case):
    x = case.make()
    made = quantize(x, key=case.key(), **case.options)
    scales, values = wide(made.scales)[:, None], integers(made)
    assert made.values.size * 8 <= (x.size + case.block_size) * case.bits
    assert abs(values).max(initial=0) <= LARGEST[case.bits]
    exact = wide(blocks_of(x, case.block_size))
    step = 1.0 if case.is_stochastic else 0.5
    assert (abs(values * scales - exact) <= (step + 2**-15) * scales).all()
    # 1/n is rounded, and the product.
    expected = abs(exact).max(axis=1, keepdims=True) / LARGEST[case.bits]
    np.testing.assert_allclose(scales, expected, rtol=2**-23)
    again = dequantize(made)
    assert (again.shape, again.dtype) == (x.shape, x.dtype)
    product = (values * np.asarray(made.scales)[:, None]).astype(np.float32)
    rounded = product.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)
    np.testing.assert_array_equal(np.asarray(again), rounded)


FAST_KERNELS = ("int4_float32",)


@pytest.mark.parametrize(
    "case",
    [c if c.name in FAST_KERNELS else slow(c) for c in CASES],
    ids=lambda case: case.name,
)
def test_the_kernel_gives_the_bits_of_the_reference(case):
    x = blocks_of(case.make(), case.block_size)
    seed = SEED if case.is_stochastic else None
    options = {"bits": case.bits, "num_cores": 1}
    expected = reference.quantize(x, seed, **options)
    with interpreted():
        made = mosaic_gpu.quantize(x, seed, **options)
        blocks = mosaic_gpu.dequantize(*expected, dtype=x.dtype, **options)
    chex.assert_trees_all_equal(made, expected, strict=True)
    again = reference.dequantize(*expected, dtype=x.dtype, **options)
    np.testing.assert_array_equal(np.asarray(blocks), np.asarray(again))


@pytest.mark.parametrize(
    ("backend", "bits"), [("reference", 8), ("reference", 4), slow(("mosaic_gpu", 8))]
)
def test_blocks_of_odd_numbers(backend, bits):
    """Zeros, what is too small, what is not finite; neighbours know nothing of it."""
    x = np.ones((8, 128), np.float32)
    x[1], x[2], x[3] = 0, 2.0**-126, 2.0**-149
    x[4, 5], x[5, 6], x[6, 7] = np.inf, -np.inf, np.nan
    x[7, 1] = np.finfo(np.float32).max
    options = {"bits": bits, "num_cores": 1}
    with interpreted():
        made = BACKENDS[backend].quantize(jnp.array(x), None, **options)
        again = BACKENDS[backend].dequantize(*made, dtype=jnp.float32, **options)
    scales, again = map(np.asarray, (made[1], again))
    # 1/n and back, rounded: 2**-23.
    np.testing.assert_allclose(again[0], 1, rtol=2**-22)
    assert (again[1:4] == 0).all() and (scales[1:4] == 0).all()
    assert np.isnan(again[4:7]).all() and np.isnan(scales[4:7]).all()
    assert np.isfinite(again[7]).all() and again[7, 1] > x[7, 1] / 2


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_right_on_average(bits):
    """The mean over n keys of a number between two integers is within 5 deviations."""
    n = 400
    scale = 1 / LARGEST[bits]
    x = jnp.sin(jnp.arange(128.0)).at[0].set(1)

    def once(key):
        made = quantize(x, bits=bits, key=key, implementation="reference")
        return dequantize(made, implementation="reference")

    made = wide(jax.vmap(once)(jax.random.split(jax.random.key(0), n)))
    # The deviation of a Bernoulli variable is at most 1/2, of a mean of n 1/2 / sqrt n.
    assert (abs(made.mean(axis=0) - wide(x)) < 5 * scale / 2 / n**0.5).all()
    # Neighbours and successive keys are rounded independently of each other.
    fraction = wide(x) / scale % 1
    up = (made / scale > wide(x) / scale) - fraction
    is_mixed = (fraction > 0.2) & (fraction < 0.8)
    for one, other in ((up[1:], up[:-1]), (up[:, 1:], up[:, :-1])):
        mixed = is_mixed if one.shape == other.shape == (n - 1, 128) else is_mixed[1:]
        products = (one * other)[:, mixed]
        # Each product has a deviation of at most 1/4.
        assert abs(products.mean()) < 5 / 4 / products.size**0.5


def test_whole_numbers_are_never_moved_by_stochastic_rounding():
    x = jnp.arange(-127.0, 128.0)[:254].at[0].set(127)
    for seed in range(20):
        made = integers(quantize(x, block_size=254, key=jax.random.key(seed)))
        np.testing.assert_array_equal(made[0], np.asarray(x, int))


def test_equal_keys_give_equal_bits_and_others_do_not():
    x = jax.random.normal(jax.random.key(0), (1000,))
    one, same, other = (
        np.asarray(quantize(x, bits=4, key=jax.random.key(k)).values) for k in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).mean() > 0.1


def test_it_can_be_jitted_and_is_a_pytree():
    x = jax.random.normal(jax.random.key(0), (23, 29))
    made = jax.jit(quantize)(x)
    assert made.shape == x.shape and made.block_size == 128
    jitted = jax.jit(partial(dequantize, dtype=jnp.bfloat16))(made)
    assert jitted.dtype == jnp.bfloat16
    assert len(jax.tree.leaves(made)) == 2


def test_what_cannot_be_done_is_refused_with_a_reason(golden):
    x = jnp.ones(3)
    calls = {
        "bits": lambda: quantize(x, bits=2),
        "odd block": lambda: quantize(x, block_size=7),
        "no block": lambda: quantize(x, block_size=0),
        "integers": lambda: quantize(jnp.arange(3)),
        "dtype": lambda: dequantize(quantize(x), dtype=int),
        "implementation": lambda: quantize(x, implementation="triton"),
        "device": lambda: quantize(x, implementation=("triton", "mosaic_gpu")),
    }
    golden.check("quantize.txt", refusals(calls))
