"""Weights in blocks of 8 and 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.adapt.small import (
    BATCH,
    normal,
    two_layers,
    two_layers_loss,
)
from zinf.adapt import lora, quantize
from zinf.adapt.blocks import NF4, OF_BITS, Encoding
from zinf.segment import named_leaves

PARTS = ["codes", "scales", "least"]


def nf4_by_hand(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values, number by number: the nearest of 16, the lower one on a tie."""
    flat = weight.reshape(-1).astype(np.float32)
    flat = np.concatenate([flat, np.zeros(-flat.size % block, np.float32)])
    codes = np.zeros(flat.size, np.uint8)
    values = np.zeros(flat.size, np.float32)
    for start in range(0, flat.size, block):
        part = flat[start : start + block]
        largest = np.max(np.abs(part))
        for i, x in enumerate(part):
            if largest:
                distance = np.abs(NF4 - x / largest)
                codes[start + i] = np.argmin(distance)
            else:
                codes[start + i] = 7  # zero
            values[start + i] = NF4[codes[start + i]] * largest
    return codes, values


def test_nf4_takes_the_nearest_value_and_packs_the_first_code_high():
    weight = np.array(normal(0, 5, 60))
    weight[1, :40] = 0
    encoding = Encoding("nf4", 64, 0)
    stored = encoding.encode(weight)
    codes, values = nf4_by_hand(weight, 64)
    assert stored["codes"].shape == (5, 32) and stored["codes"].dtype == jnp.uint8
    high, low = np.asarray(stored["codes"]) >> 4, np.asarray(stored["codes"]) & 15
    np.testing.assert_array_equal(np.stack([high, low], -1).reshape(-1), codes)
    found = encoding.decode(stored, (5, 60))
    np.testing.assert_allclose(
        np.asarray(found).reshape(-1), values[: weight.size], rtol=1e-6
    )


def test_nf4_is_symmetric_in_its_ends_and_has_an_exact_zero():
    assert NF4[0] == -1 and NF4[7] == 0 and NF4[15] == 1 and np.all(np.diff(NF4) > 0)
    stored = Encoding("nf4", 64, 0).encode(jnp.zeros((4, 32)))
    assert not np.any(Encoding("nf4", 64, 0).decode(stored, (4, 32)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_from_the_least_to_the_largest_are_deepspeeds(bits):
    """As `Quantizer` and `DeQuantizer` of its inference/quantization/utils.py."""
    weight = np.array(normal(0, 4, 32)) + np.float32(0.5)
    weight[1] = 0.25  # All numbers of the group are equal.
    encoding = Encoding(OF_BITS[bits, False], 32, 0)
    stored = encoding.encode(weight)
    least, most = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    step = (most - least) / np.float32(2**bits - 1)
    codes = np.rint((weight - least) / np.where(step > 0, step, 1)).astype(np.uint8)
    if bits == 4:
        wanted = codes[:, 0::2] << 4 | codes[:, 1::2]
    else:
        wanted = codes
    np.testing.assert_array_equal(stored["codes"], wanted)
    found = np.asarray(encoding.decode(stored, weight.shape))
    # The product and the sum round once each.
    np.testing.assert_allclose(found, codes * step + least, rtol=3e-7, atol=3e-7)
    assert np.all(np.abs(found - weight) <= 0.501 * step + 3e-7)
    assert np.all(found[1] == 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "int8", "int4", "uint8", "uint4"])
def test_a_row_of_a_stack_is_decoded_alone(name):
    """Blocks do not cross rows, so a segment reads only its own layer."""
    weight = normal(1, 3, 7, 11)
    encoding = Encoding(name, 16, 1)
    stored = encoding.encode(weight)
    shapes = encoding.shapes(weight.shape)
    assert {n: x.shape for n, x in stored.items()} == {
        n: s.shape for n, s in shapes.items()
    }
    assert {n: x.dtype for n, x in stored.items()} == {
        n: s.dtype for n, s in shapes.items()
    }
    whole = encoding.decode(stored, (7, 11))
    row = encoding.decode({n: x[1] for n, x in stored.items()}, (7, 11))
    np.testing.assert_array_equal(row, whole[1])
    # Half of the widest gap of the code book: 1/127, or 0.304 between the last two.
    # From the least to the largest it is at most twice the largest magnitude.
    bound = {
        "int8": 0.51 / 127,
        "int4": 0.51 / 7,
        "uint8": 0.51 * 2 / 255,
        "uint4": 0.51 * 2 / 15,
        "nf4": 0.153,
    }[name]
    largest = np.max(np.abs(weight))
    assert np.max(np.abs(whole - weight)) <= bound * largest


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_the_loss_is_that_of_the_decoded_weights(name):
    params = two_layers()
    adapted = lora(
        two_layers_loss, params, batch=BATCH, r=2, quantize_base=name, quantize_block=16
    )
    base = named_leaves(adapted.params["base"])
    assert [*base] == [
        "first/bias",
        "first/kernel/codes",
        "first/kernel/scales",
        "second/kernel/codes",
        "second/kernel/scales",
    ]
    decoded = adapted.merge(adapted.params)
    found = adapted.loss_fn(adapted.params, BATCH)
    np.testing.assert_allclose(found, two_layers_loss(decoded, BATCH), rtol=1e-6)
    assert not np.array_equal(decoded["first"]["kernel"], params["first"]["kernel"])


def test_scales_are_bits_that_mixed_precision_does_not_round():
    adapted = lora(two_layers_loss, two_layers(), batch=BATCH, r=2, quantize_base="nf4")
    dtypes = {x.dtype for x in jax.tree.leaves(adapted.params["base"]["second"])}
    assert dtypes == {np.dtype(np.uint8), np.dtype(np.uint32)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{"num_bits": 8, "symmetric": True}, {"num_bits": 4}]
)
def test_quantized_weights_alone_are_decoded_where_they_are_used(options):
    params = two_layers()
    kept = quantize(two_layers_loss, params, batch=BATCH, group_size=16, **options)
    base = named_leaves(kept.params["base"])
    parts = ["codes", "scales"] if "symmetric" in options else PARTS
    names = ("first/kernel", "second/kernel")
    wanted = {f"{name}/{part}" for name in names for part in parts}
    assert base.keys() == wanted | {"first/bias"} and kept.params["adapter"] == {}
    decoded = kept.merge(kept.params)
    found = kept.loss_fn(kept.params, BATCH)
    np.testing.assert_allclose(found, two_layers_loss(decoded, BATCH), rtol=1e-6)
    applied = kept.applied(two_layers_loss)
    assert applied(kept.params, BATCH) == found


def test_a_model_without_a_linear_layer_has_nothing_to_quantize():
    with pytest.raises(ValueError, match="multiplies no parameter by an activation"):
        quantize(
            lambda params, batch: (params["w"] * batch).sum(),
            {"w": jnp.ones(3)},
            batch=jnp.ones(3),
            num_bits=8,
        )
