"""Weights in blocks of 8 and 4 bits."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.unit.adapt.small import BATCH, normal, two_layers, two_layers_loss
from zinf.adapt import lora, quantize
from zinf.adapt.blocks import Encoding
from zinf.adapt.forms import FORMS, NF4, OF_BITS
from zinf.core.segment import named_leaves
from zinf.core.topology import memory, parse_topology


def nf4_by_hand(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values, number by number: the nearest of 16, the lower one on a tie."""
    flat = weight.reshape(-1).astype(np.float32)
    blocks = np.append(flat, np.zeros(-flat.size % block, "f")).reshape(-1, block)
    codes, values = np.full(blocks.shape, 7, np.uint8), np.zeros_like(blocks)  # 7: zero
    for i, part in enumerate(blocks):
        largest = np.max(np.abs(part))
        for j, x in enumerate(part if largest else ()):
            codes[i, j] = np.argmin(np.abs(NF4 - x / largest))
        values[i] = NF4[codes[i]] * largest
    return codes.reshape(-1), values.reshape(-1)


def test_nf4_takes_the_nearest_value_and_packs_the_first_code_high():
    assert NF4[0] == -1 and NF4[7] == 0 and NF4[15] == 1 and np.all(np.diff(NF4) > 0)
    weight = np.array(normal(0, 5, 60))
    weight[1, :40] = 0
    weight[2:4] = 0  # A whole block.
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
    wanted = codes if bits == 8 else codes[:, 0::2] << 4 | codes[:, 1::2]
    np.testing.assert_array_equal(stored["codes"], wanted)
    found = np.asarray(encoding.decode(stored, weight.shape))
    # The product and the sum round once each.
    np.testing.assert_allclose(found, codes * step + least, rtol=3e-7, atol=3e-7)
    assert np.all(np.abs(found - weight) <= 0.501 * step + 3e-7)
    assert np.all(found[1] == 0.25)


# Half of the widest gap of the code book: 1/127, or 0.304 between the last two. From
# the least to the largest it is at most twice the largest magnitude.
GAPS = {
    "int8": 0.51 / 127,
    "int4": 0.51 / 7,
    "uint8": 0.51 * 2 / 255,
    "uint4": 0.51 * 2 / 15,
    "nf4": 0.153,
    # From 4 to 6 of 6, or from 6 to 8, which powers of 2 cut off; and a scale in float8
    # is 1/16 off.
    "mxfp4": 0.251,
    "nvfp4": 0.51 * (2 / 6) * (17 / 16),
    "nvfp4_over": 0.51 * (2 / 6) * (17 / 16),
}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_of_a_stack_is_decoded_alone(name, is_turned):
    """Blocks do not cross rows, so a segment reads only its own layer."""
    weight = normal(1, 3, 7, 11)
    encoding = Encoding(name, 16, 1, is_turned=is_turned)
    stored = encoding.encode(weight)
    shapes = encoding.shapes(weight.shape)
    about = {n: (x.shape, x.dtype) for n, x in stored.items()}
    assert about == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    whole = encoding.decode(stored, (7, 11))
    row = encoding.decode({n: x[1] for n, x in stored.items()}, (7, 11))
    np.testing.assert_array_equal(row, whole[1])
    largest = np.max(np.abs(weight))
    assert np.max(np.abs(whole - weight)) <= GAPS[name] * largest


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("name", "block"), [("nf4", 64), ("uint4", 64), ("nvfp4", 16)])
def test_a_tpu_decodes_four_bits_in_little_memory(name, block):
    """A last dim of 2 would be padded to 128: 64 times the memory of the weight."""
    v5p, shape = parse_topology("v5p:1x1x1"), (1024, 1024)
    encoding = Encoding(name, block)
    there = SingleDeviceSharding(v5p.devices()[0])

    def argument(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    stored = jax.tree.map(argument, encoding.shapes(shape))
    x = argument(jax.ShapeDtypeStruct(shape, jnp.bfloat16))

    def product(stored, x):
        return x @ encoding.decode(stored, shape).astype(x.dtype)

    found = memory(v5p.compile(jax.jit(product).lower(stored, x)))
    # Numbers are put in order by block, in bfloat16; a block is padded to 128.
    padded_bytes = prod(shape) * 128 // block * 2
    assert found.temp_bytes <= padded_bytes + 2 * prod(shape) * 4


def encoded(**options):
    """The two layers, with adapters on weights in blocks, or without adapters."""
    if "quantize_base" in options:
        named = {"r": 2, "quantize_block": 16, **options}
        return lora(two_layers_loss, two_layers(), batch=BATCH, **named)
    named = {"group_size": 16, **options}
    return quantize(two_layers_loss, two_layers(), batch=BATCH, **named)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"quantize_base": "nf4"}, ["codes", "scales"]),
        ({"num_bits": 8, "symmetric": True}, ["codes", "scales"]),
        ({"num_bits": 4}, ["codes", "scales", "least"]),
    ],
    ids=["adapted", "symmetric", "from the least"],
)
def test_the_loss_is_that_of_the_decoded_weights(options, parts):
    params, adapted = two_layers(), encoded(**options)
    base = named_leaves(adapted.params["base"])
    names = ("first/kernel", "second/kernel")
    wanted = {f"{name}/{part}" for name in names for part in parts}
    assert base.keys() == wanted | {"first/bias"}
    assert bool(adapted.params["adapter"]) == ("quantize_base" in options)
    decoded = adapted.merge(adapted.params)
    found = adapted.loss_fn(adapted.params, BATCH)
    np.testing.assert_allclose(found, two_layers_loss(decoded, BATCH), rtol=1e-6)
    assert adapted.applied(two_layers_loss)(adapted.params, BATCH) == found
    assert not np.array_equal(decoded["first"]["kernel"], params["first"]["kernel"])
    # Scales are bits that mixed precision does not round.
    dtypes = {str(x.dtype) for x in jax.tree.leaves(adapted.params["base"]["second"])}
    assert dtypes == {"int8" if "symmetric" in options else "uint8", "uint32"}


def test_a_model_without_a_linear_layer_has_nothing_to_quantize():
    with pytest.raises(ValueError, match="multiplies no parameter by an activation"):
        quantize(
            lambda params, batch: (params["w"] * batch).sum(),
            {"w": jnp.ones(3)},
            batch=jnp.ones(3),
            num_bits=8,
        )
