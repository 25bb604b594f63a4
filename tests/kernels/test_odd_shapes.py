"""Ops on the device hold their bounds for any shape: primes, empty, one row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import test_cross_entropy as cross_entropy
from tests.kernels import test_tiled_matmul as matmul
from zinf_kernels.cross_entropy.cases import Case as LossCase
from zinf_kernels.quantize import dequantize, quantize
from zinf_kernels.quantize.blocks import LARGEST
from zinf_kernels.tiled_matmul.cases import Case as MatmulCase

pytestmark = pytest.mark.slow

LENGTHS = st.sampled_from([0, 1, 2, 5, 23, 29, 31, 64, 101])
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
# Each example is compiled, which takes up to a second.
few = settings(max_examples=6, deadline=None)


@few
@given(
    sizes=st.tuples(LENGTHS, LENGTHS, LENGTHS),
    dtype=DTYPES,
    has_bias=st.booleans(),
    residual_dtype=st.sampled_from([None, jnp.float32]),
)
def test_products_and_their_gradients(sizes, dtype, has_bias, residual_dtype):
    rest = None, has_bias, residual_dtype
    case = MatmulCase("odd", *sizes, dtype, *rest)
    matmul.test_the_reference_is_within_the_bound_of_exact_arithmetic(case)
    matmul.test_gradients_are_those_of_exact_arithmetic(case)


@few
@given(
    batch=st.sampled_from([(), (0,), (1,), (23,), (3, 7)]),
    dim=st.sampled_from([1, 7, 32]),
    vocab=st.sampled_from([1, 2, 29, 64, 97]),
    dtype=DTYPES,
    vocab_axis=st.sampled_from([0, 1]),
    pieces=st.tuples(st.sampled_from([1, 5, 64]), st.sampled_from([7, 29, 100])),
)
def test_losses_and_their_gradients(batch, dim, vocab, dtype, vocab_axis, pieces):
    case = LossCase("odd", batch, dim, vocab, dtype, vocab_axis, *pieces, 0.01, 0.2)
    cross_entropy.test_loss_and_gradients_are_those_of_exact_arithmetic(case, "xla")


@few
@given(
    shape=st.lists(LENGTHS, max_size=2).map(tuple),
    dtype=DTYPES,
    bits=st.sampled_from([8, 4]),
    block_size=st.sampled_from([2, 64, 128, 256]),
    is_stochastic=st.booleans(),
)
def test_quantized_numbers(shape, dtype, bits, block_size, is_stochastic):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal(shape), dtype)
    key = jax.random.key(1) if is_stochastic else None
    made = quantize(x, bits=bits, block_size=block_size, key=key)
    again = dequantize(made, dtype=jnp.float32)
    assert (again.shape, again.dtype) == (x.shape, jnp.float32)
    wide: Any = np.asarray(x, np.float64).reshape(-1)
    blocks = np.pad(wide, (0, -wide.size % block_size)).reshape(-1, block_size)
    scales = np.repeat(abs(blocks).max(axis=1) / LARGEST[bits], block_size)
    error = abs(np.asarray(again, np.float64).reshape(-1) - wide)
    # To a neighbour, or the nearer one, and the scale's own rounding.
    allowed = (1.0 if is_stochastic else 0.5) + 2.0**-14
    assert (error <= allowed * scales[: wide.size]).all()
