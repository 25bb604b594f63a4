"""`quantize`: what it promises, and that the kernel gives the reference's bits."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_kernels.absent_gpu import GPUS, compile_for
from zinf_kernels.device import Device
from zinf_kernels.interpreter import interpreted
from zinf_kernels.quantize import dequantize, mosaic_gpu, obstacles, quantize, reference
from zinf_kernels.quantize.blocks import LARGEST, blocks_of
from zinf_kernels.quantize.cases import cases

CASES = tuple(cases())
CPU = Device("cpu", "cpu", 1)

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def wide(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def rows(x, block_size: int) -> np.ndarray:
    return wide(blocks_of(x, block_size))


def integers(quantized) -> np.ndarray:
    """The values, unpacked in NumPy as the layout is described."""
    values = np.asarray(quantized.values)
    if quantized.bits == 8:
        return values
    lower = ((values & 15) ^ 8) - 8
    return np.concatenate([lower, values >> 4], axis=1)


@pytest.mark.sampled(3)
@by_case
def test_what_is_lost_is_within_the_stated_bound(case):
    x = case.make()
    made = quantize(x, key=case.key(), **case.options)
    scales, values = wide(made.scales)[:, None], integers(made)
    assert abs(values).max() <= LARGEST[case.bits]
    exact = rows(x, case.block_size)
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


@pytest.mark.sampled(1)
@by_case
def test_the_kernel_gives_the_bits_of_the_reference(case):
    x = blocks_of(case.make(), case.block_size)
    seed = jnp.array([1, 2**32 - 1], jnp.uint32) if case.is_stochastic else None
    options = {"bits": case.bits, "num_cores": 1}
    expected = reference.quantize(x, seed, **options)
    with interpreted():
        made = mosaic_gpu.quantize(x, seed, **options)
        blocks = mosaic_gpu.dequantize(*expected, dtype=x.dtype, **options)
    chex.assert_trees_all_equal(made, expected, strict=True)
    again = reference.dequantize(*expected, dtype=x.dtype, **options)
    np.testing.assert_array_equal(np.asarray(blocks), np.asarray(again))


@pytest.mark.slow
def test_the_kernel_takes_several_tiles_in_turn():
    """5 tiles on 2 threads of blocks: slots of results are written a second time."""
    seed = jnp.array([1, 2**32 - 1], jnp.uint32)
    x = jax.random.normal(jax.random.key(0), (5 * 64, 128), jnp.bfloat16)
    expected = reference.quantize(x, seed, bits=8, num_cores=1)
    with interpreted():
        made = mosaic_gpu.quantize(x, seed, bits=8, num_cores=1)
    chex.assert_trees_all_equal(made, expected, strict=True)


def odd(implementation: str, x: jax.Array, *, bits: int):
    options = {"bits": bits, "num_cores": 1}
    backend = {"mosaic_gpu": mosaic_gpu, "reference": reference}[implementation]
    with interpreted():
        values, scales = backend.quantize(x, None, **options)
        return backend.dequantize(values, scales, dtype=jnp.float32, **options), scales


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "reference"])
@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_of_odd_numbers(implementation, bits):
    """Zeros, what is too small, what is not finite; neighbours know nothing of it."""
    x = np.ones((8, 128), np.float32)
    x[1], x[2], x[3] = 0, 2.0**-126, 2.0**-149
    x[4, 5], x[5, 6], x[6, 7] = np.inf, -np.inf, np.nan
    x[7, 1] = np.finfo(np.float32).max
    made, scales = odd(implementation, jnp.array(x), bits=bits)
    made = np.asarray(made)
    # 1/n and back, rounded: 2**-23.
    np.testing.assert_allclose(made[0], 1, rtol=2**-22)
    assert (made[1:4] == 0).all() and (np.asarray(scales)[1:4] == 0).all()
    assert np.isnan(made[4:7]).all() and np.isnan(np.asarray(scales)[4:7]).all()
    assert np.isfinite(made[7]).all() and made[7, 1] > x[7, 1] / 2


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
        key = jax.random.key(seed)
        made = integers(quantize(x, block_size=254, key=key))
        np.testing.assert_array_equal(made[0], np.asarray(x, int))


def test_equal_keys_give_equal_bits_and_others_do_not():
    x = jax.random.normal(jax.random.key(0), (1000,))
    one, same, other = (
        np.asarray(quantize(x, bits=4, key=jax.random.key(k)).values) for k in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).mean() > 0.1


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    shape=st.lists(st.integers(0, 13), max_size=2).map(tuple),
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from([2, 6, 128]),
)
def test_any_shape_comes_back_within_the_bound(shape, bits, block_size):
    x = jnp.sin(jnp.arange(np.prod(shape, dtype=int)) * 37.0).reshape(shape)
    made = quantize(x, bits=bits, block_size=block_size)
    again = dequantize(made)
    assert (again.shape, again.dtype) == (x.shape, x.dtype)
    assert made.values.size * 8 <= (x.size + block_size) * bits
    if x.size:
        exact, scales = rows(x, block_size), wide(made.scales)[:, None]
        assert (abs(rows(again, block_size) - exact) <= 0.50004 * scales).all()


def test_it_can_be_jitted_and_is_a_pytree():
    x = jax.random.normal(jax.random.key(0), (23, 29))
    made = jax.jit(quantize)(x)
    assert made.shape == x.shape and made.block_size == 128
    jitted = jax.jit(partial(dequantize, dtype=jnp.bfloat16))(made)
    assert jitted.dtype == jnp.bfloat16
    assert len(jax.tree.leaves(made)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 2}, "bits is 2. Pass 8 or 4"),
        ({"block_size": 7}, "block_size is 7. Pass an even number"),
        ({"implementation": "triton"}, "no implementation 'triton'"),
        (
            {"implementation": "mosaic_gpu"},
            "cannot run: it is for GPUs and this is a CPU",
        ),
        ({"implementation": ("triton", "mosaic_gpu")}, "'mosaic_gpu' cannot run"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(jnp.ones(3), **options)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="int32, which is none of float32"):
        quantize(jnp.arange(3))


def test_one_can_ask_which_implementations_can_run_where():
    x = jnp.ones(1000)
    assert obstacles(GPUS["H200"].device, x=x) == {}
    assert (
        "blocks have 128 or 256"
        in obstacles(GPUS["H100"].device, x=x, block_size=64)["mosaic_gpu"]
    )
    assert (
        "needs compute capability 9.0"
        in obstacles(GPUS["T4"].device, x=x)["mosaic_gpu"]
    )
    assert "empty" in obstacles(GPUS["H100"].device, x=x[:0])["mosaic_gpu"]
    assert "for GPUs" in obstacles(CPU, x=x)["mosaic_gpu"]


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("bits", [8, 4])
def test_it_compiles_for_every_gpu_to_a_kernel_where_there_is_one(gpu, bits):
    def there_and_back(x):
        made = quantize(x, bits=bits, key=jax.random.key(0))
        return made.values, dequantize(made)

    x = jax.ShapeDtypeStruct((1 << 16,), jnp.bfloat16)
    text = compile_for(GPUS[gpu], there_and_back, x).as_text()
    assert ("mosaic_gpu" in text) == (GPUS[gpu].capability == (9, 0))
