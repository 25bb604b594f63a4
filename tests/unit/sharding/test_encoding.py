"""Parts of arrays as 8-bit integers in blocks, and back."""

from math import prod

import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.sharding import Blocks

BLOCKS = Blocks()


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def there_and_back(part, blocks=BLOCKS):
    sent = [x[None] for x in blocks.encode(jnp.asarray(part))]
    (found,) = blocks.decode(sent, part.shape, part.dtype)
    return np.asarray(found)


@pytest.mark.parametrize("shape", [(3, 17), (2, 4, 96), (1000,)])
def test_a_number_is_rounded_by_half_a_step_of_its_block(shape):
    part = normal(*shape)
    rows = part.reshape(-1, prod(shape[1:]) if len(shape) > 1 else shape[0])
    # `zinf_kernels.quantize`: (1/2 + 2^-15) of a scale, which is the largest over 127.
    steps = np.abs(rows).max(1, keepdims=True) / 127
    error = np.abs(there_and_back(part).reshape(rows.shape) - rows)
    assert np.all(error <= (0.5 + 2.0**-14) * steps)
    assert np.any(error > 0)


def test_rows_are_rounded_alone_as_in_the_whole():
    part = normal(6, 300)
    whole = there_and_back(part)
    for rows in (slice(0, 1), slice(2, 5)):
        np.testing.assert_array_equal(there_and_back(part[rows]), whole[rows])


def test_four_bytes_are_sent_for_each_block_besides_one_for_each_number():
    values, scales = BLOCKS.encode(jnp.asarray(normal(8, 512)))
    assert (values.nbytes, scales.nbytes) == (8 * 512, 4 * 8 * 2)


def test_parts_with_short_rows_are_not_worth_it():
    assert BLOCKS.is_worth_it((4, 16))
    assert not BLOCKS.is_worth_it((1 << 20, 15))
    assert BLOCKS.is_worth_it((16,))
    assert not BLOCKS.is_worth_it(())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_was_decoded_to_16_bits_is_encoded_as_before(dtype):
    # With numbers near the least of a float16 that is not zero, 2^-24.
    sizes = 2.0 ** np.arange(-26, 4)[:, None]
    part = jnp.asarray(normal(30, 600) * sizes, dtype)
    sent = BLOCKS.encode(part)
    (once,) = BLOCKS.decode([x[None] for x in sent], part.shape, dtype)
    np.testing.assert_array_equal(there_and_back(once), once)
    is_normal = np.abs(np.asarray(part, np.float32)).max(1) > 2.0**-12
    for before, after in zip(sent, BLOCKS.encode(once), strict=True):
        before, after = (np.asarray(x).reshape(30, -1) for x in (before, after))
        np.testing.assert_array_equal(before[is_normal], after[is_normal])
