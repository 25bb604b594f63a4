"""Forms of codes of 8 and 4 bits, and the numbers that they stand for.

| form | a number is |
|---|---|
| `int8`, `int4` | code * scale, symmetric: those of `zinf_kernels.quantize` |
| `uint8`, `uint4` | least + code * scale: from the least to the largest of the block |
| `nf4` | one of the 16 of `NF4`, times the largest magnitude of the block |
| `mxfp4` | one of `FP4`, times a power of 2 |
| `nvfp4` | one of `FP4`, times (scale in float8 * the scale of the weight) |
| `nvfp4_over` | one of `FP4`, times (scale in float8 / the scale of the weight) |

`uint8` and `uint4` are DeepSpeed's (`deepspeed/inference/quantization`). `nf4` is that
of QLoRA (https://arxiv.org/abs/2305.14314, section 3 and appendix E), and of
bitsandbytes. The last three are of published models: microscaling
(https://arxiv.org/abs/2310.10537), NVIDIA's ModelOpt, and compressed-tensors, whose
quotient is not rounded as a product is.

Scales are stored as the bits of their numbers: mixed precision would round floats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from zinf_kernels.quantize import quantize

CODES, SCALES, LEAST, TENSOR_SCALE = "codes", "scales", "least", "tensor_scale"
Name = Literal["int8", "int4", "uint8", "uint4", "nf4", "mxfp4", "nvfp4", "nvfp4_over"]
# By the number of bits, and whether codes are symmetric.
OF_BITS: dict[tuple[int, bool], Name] = {
    (8, True): "int8",
    (4, True): "int4",
    (8, False): "uint8",
    (4, False): "uint4",
}
# XLA does not cut a kernel over the devices of a mesh; it does cut plain jnp.
CUT_BY_XLA = "reference"
# Quantiles of the normal distribution, 8 of each sign and 0, from the paper's appendix.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
# Floats of 4 bits: sign, 2 bits of exponent, 1 of mantissa (e2m1).
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)
# The largest of FP4 is 1.5 * 2**2, and that of float8 is 448.
FP4_EXPONENT, LARGEST_FLOAT8 = 2, 448
MANTISSA_BITS = 23  # Of float32; the exponent is in the bits above.


@dataclass(frozen=True)
class Form:
    """How blocks of numbers are kept as codes. Codes of 4 bits are two a byte, the
    first in the high half.

    Attributes:
        bits: of a code.
        encode: of float32 [blocks, size]: codes [blocks, bytes], and the arrays of
            `scales` and `whole`.
        decode: of codes [bytes, blocks] and these arrays [1, blocks]: the numbers in
            float32 [size, blocks]. Blocks come last because TPUs pad the last dim to
            128: two codes of a byte would take 64 times their memory.
        scales: names and dtypes of the arrays with an entry for each block.
        whole: names and dtypes of those with one entry for all blocks.
        dtype: of codes.
    """

    bits: int
    encode: Callable[[Any], tuple[Any, ...]]
    decode: Callable[..., Any]
    scales: Mapping[str, str] = field(default_factory=lambda: {SCALES: "uint32"})
    whole: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "uint8"


def _to_integers(blocks: Any, *, bits: int) -> tuple[Any, Any]:
    size = blocks.shape[1]
    how = {"bits": bits, "block_size": size, "implementation": CUT_BY_XLA}
    found = quantize(blocks, **how)
    return found.values, _bits(found.scales)


def _of_integers(codes: Any, scales: Any, *, bits: int) -> Any:
    integers = codes.astype(jnp.int32)
    if bits == 4:
        # The lower halves of all bytes, then the upper ones; see `Quantized`.
        twice = jnp.tile(integers, (2, 1))
        is_upper = lax.broadcasted_iota(jnp.int32, twice.shape, 0) >= len(codes)
        integers = (twice << jnp.where(is_upper, 24, 28)) >> 28
    return integers.astype(jnp.float32) * _floats(scales)


def _from_least(blocks: Any, *, bits: int) -> tuple[Any, Any, Any]:
    """Codes from 0 to 2**bits - 1, the step between codes, and the value of code 0."""
    largest = np.float32(2**bits - 1)
    least = jnp.min(blocks, axis=1)
    scales = (jnp.max(blocks, axis=1) - least) / largest
    codes = jnp.round((blocks - least[:, None]) * (1 / _divisor(scales))[:, None])
    codes = jnp.clip(codes, 0, largest).astype(jnp.uint8)
    return codes if bits == 8 else _packed(codes), _bits(scales), _bits(least)


def _of_least(codes: Any, scales: Any, least: Any, *, bits: int) -> Any:
    numbers = codes if bits == 8 else _unpacked(codes)
    return numbers.astype(jnp.float32) * _floats(scales) + _floats(least)


def _to_nf4(blocks: Any) -> tuple[Any, Any]:
    scales = jnp.max(jnp.abs(blocks), axis=1)
    # bitsandbytes multiplies by the reciprocal.
    values = blocks * (1 / _divisor(scales))[:, None]
    return _nearest(NF4, values), _bits(scales)


def _of_nf4(codes: Any, scales: Any) -> Any:
    return _looked_up(NF4, codes) * _floats(scales)


def _to_mxfp4(blocks: Any) -> tuple[Any, Any]:
    """Codes, and biased exponents so that the largest number is at most 8, or 6."""
    largest = jnp.max(jnp.abs(blocks), axis=1)
    exponents = (_bits(largest) >> MANTISSA_BITS).astype(jnp.int32) - FP4_EXPONENT
    powers = jnp.clip(exponents, 1, None).astype(jnp.uint8)
    return _nearest(FP4, blocks / _power(powers)[:, None]), powers


def _of_mxfp4(codes: Any, powers: Any) -> Any:
    # Two factors: float32 has no normal number for the exponent 0, and XLA takes 0.
    half = powers // 2
    found = _looked_up(FP4, codes) * _power(half + 63)
    return found * _power(powers - half + 64)


def _to_nvfp4(blocks: Any, *, divides: bool) -> tuple[Any, Any, Any]:
    needed = jnp.max(jnp.abs(blocks), axis=1) / FP4.max()
    whole = _divisor(jnp.max(needed, keepdims=True) / LARGEST_FLOAT8)
    scales = (needed / whole).astype(jnp.float8_e4m3fn)
    codes = _nearest(
        FP4, blocks / _divisor(scales.astype(jnp.float32) * whole)[:, None]
    )
    scales = lax.bitcast_convert_type(scales, jnp.uint8)
    return codes, scales, _bits(1 / whole if divides else whole)


def _of_nvfp4(codes: Any, scales: Any, whole: Any, *, divides: bool) -> Any:
    scales = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
    steps = scales / _floats(whole) if divides else scales * _floats(whole)
    return _looked_up(FP4, codes) * steps


def _integers(bits: int) -> Form:
    encode, decode = partial(_to_integers, bits=bits), partial(_of_integers, bits=bits)
    return Form(bits, encode, decode, dtype="int8")


def _unsigned(bits: int) -> Form:
    encode, decode = partial(_from_least, bits=bits), partial(_of_least, bits=bits)
    return Form(bits, encode, decode, {SCALES: "uint32", LEAST: "uint32"})


def _nvfp4(divides: bool) -> Form:
    encode = partial(_to_nvfp4, divides=divides)
    decode = partial(_of_nvfp4, divides=divides)
    return Form(4, encode, decode, {SCALES: "uint8"}, {TENSOR_SCALE: "uint32"})


FORMS: dict[Name, Form] = {
    "int8": _integers(8),
    "int4": _integers(4),
    "uint8": _unsigned(8),
    "uint4": _unsigned(4),
    "nf4": Form(4, _to_nf4, _of_nf4),
    "mxfp4": Form(4, _to_mxfp4, _of_mxfp4, {SCALES: "uint8"}),
    "nvfp4": _nvfp4(divides=False),
    "nvfp4_over": _nvfp4(divides=True),
}


def _bits(numbers: Any) -> Any:
    return lax.bitcast_convert_type(numbers, jnp.uint32)


def _floats(bits: Any) -> Any:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _power(exponents: Any) -> Any:
    """2 to the power (exponent - 127), of uint8 from 1 to 254."""
    return _floats(exponents.astype(jnp.uint32) << MANTISSA_BITS)


def _divisor(scales: Any) -> Any:
    """Scales, with 1 in place of 0."""
    return jnp.where(scales > 0, scales, jnp.ones_like(scales))


def _nearest(book: np.ndarray, values: Any) -> Any:
    """Codes of the nearest of 16 numbers, the lower one on a tie, two a byte."""
    ordered, codes = np.unique(book, return_index=True)
    # A number takes the nearest value: it lies between the means of neighbours.
    borders = jnp.asarray((ordered[1:] + ordered[:-1]) / 2)
    places = jnp.searchsorted(borders, values, side="left")
    return _packed(jnp.asarray(codes.astype(np.uint8))[places])


def _looked_up(book: np.ndarray, codes: Any) -> Any:
    """The numbers of codes of 4 bits [bytes, blocks], float32 [size, blocks].

    By selections, which fuse with what reads the numbers on every platform.
    """
    places = _unpacked(codes)
    numbers = [jnp.asarray(number) for number in book]
    for bit in range(4):
        is_set = places & (1 << bit) != 0
        pairs = zip(numbers[0::2], numbers[1::2], strict=True)
        numbers = [jnp.where(is_set, second, first) for first, second in pairs]
    return numbers[0]


def _packed(codes: Any) -> Any:
    """Codes of 4 bits packed two a byte, the first in the high half."""
    return (codes[:, 0::2] << 4) | codes[:, 1::2]


def _unpacked(codes: Any) -> Any:
    """Codes of 4 bits, int32 [2 * bytes, blocks], of bytes [bytes, blocks]."""
    twice = jnp.repeat(codes, 2, axis=0).astype(jnp.int32)
    is_second = lax.broadcasted_iota(jnp.int32, twice.shape, 0) & 1
    return (twice >> (4 - 4 * is_second)) & 15
