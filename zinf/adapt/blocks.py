"""Frozen weights in blocks of 8 or 4 bits, each with a scale.

| name | value of a code |
|---|---|
| `int8`, `int4` | code * scale, symmetric: those of `zinf_kernels.quantize` |
| `uint8`, `uint4` | least + code * scale: from the least to the largest of the block |
| `nf4` | one of the 16 of `NF4`, times the largest magnitude of the block |

`uint8` and `uint4` are DeepSpeed's (`deepspeed/inference/quantization`). `nf4` is that
of QLoRA (https://arxiv.org/abs/2305.14314, section 3 and appendix E), and of
bitsandbytes.

Scales are stored as the bits of float32 numbers: mixed precision would round floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zinf_kernels.quantize import Quantized, dequantize, quantize

CODES, SCALES, LEAST = "codes", "scales", "least"
Name = Literal["int8", "int4", "uint8", "uint4", "nf4"]
BITS: dict[Name, int] = {"int8": 8, "int4": 4, "uint8": 8, "uint4": 4, "nf4": 4}
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
# The two values of each byte. One lookup a byte takes half the memory of one a number.
PAIRS = np.stack([NF4[np.arange(256) >> 4], NF4[np.arange(256) & 15]], axis=1)
# A number takes the nearest value: it lies between the means of neighbours.
BORDERS = (NF4[1:] + NF4[:-1]) / 2


@dataclass(frozen=True)
class Encoding:
    """How a weight is stored: rows of blocks.

    A weight's leading `stack` dims stay dims, so that a row of a stack is read alone.
    The rest is flattened, and filled up with zeros to whole blocks.
    """

    name: Name
    block: int
    stack: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays that a weight is stored as; the codes come first."""
        return (CODES, SCALES) if self.is_symmetric else (CODES, SCALES, LEAST)

    @property
    def is_symmetric(self) -> bool:
        return not self.name.startswith("u")

    @property
    def bits(self) -> int:
        return BITS[self.name]

    def shapes(self, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays that a weight of this shape is stored as."""
        lead = shape[: self.stack]
        count = -(-prod(shape[self.stack :]) // self.block)
        width = self.block * self.bits // 8
        dtype = jnp.int8 if self.name.startswith("int") else jnp.uint8
        found = {CODES: jax.ShapeDtypeStruct((*lead, count, width), dtype)}
        of_blocks = jax.ShapeDtypeStruct((*lead, count), jnp.uint32)
        return found | dict.fromkeys(self.names[1:], of_blocks)

    def encode(self, weight: Any) -> dict[str, Any]:
        """Encode a weight as the arrays that it is stored as, by name.

        Entries must be finite.
        """
        lead = weight.shape[: self.stack]
        rows = jnp.asarray(weight).astype(jnp.float32).reshape(prod(lead), -1)
        rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % self.block)))
        found = self.encode_blocks(rows.reshape(-1, self.block))
        return {
            name: part.reshape(*lead, -1, *part.shape[1:])
            for name, part in found.items()
        }

    def encode_blocks(self, blocks: Any) -> dict[str, Any]:
        """Codes [count, width] and one number a block [count] of [count, block]."""
        if self.name == "nf4":
            codes, *numbers = _nf4(blocks)
        elif self.is_symmetric:
            found = quantize(
                blocks,
                bits=self.bits,
                block_size=self.block,
                implementation=CUT_BY_XLA,
            )
            codes, numbers = found.values, [found.scales]
        else:
            codes, *numbers = _from_least(blocks, self.bits)
        bits = [lax.bitcast_convert_type(x, jnp.uint32) for x in numbers]
        return dict(zip(self.names, [codes, *bits], strict=True))

    def decode(self, arrays: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
        """The weight, or some rows of its stack, in float32.

        Args:
            shape: that of one row, which is all of a weight without a stack.
        """
        codes = arrays[CODES]
        lead = codes.shape[:-2]
        codes = codes.reshape(-1, codes.shape[-1])
        scales, *least = (
            lax.bitcast_convert_type(arrays[name].reshape(-1), jnp.float32)
            for name in self.names[1:]
        )
        if self.name == "nf4":
            pairs = jnp.asarray(PAIRS).at[codes.astype(jnp.int32)].get(mode="clip")
            blocks = pairs.reshape(codes.shape[0], -1) * scales[:, None]
        elif self.is_symmetric:
            numel = codes.shape[0] * self.block
            dtype = jnp.dtype(jnp.float32)
            blocks = dequantize(
                Quantized(codes, scales, (numel,), dtype, self.bits),
                implementation=CUT_BY_XLA,
            )
        else:
            whole = codes if self.bits == 8 else _unpacked(codes)
            blocks = whole.astype(jnp.float32) * scales[:, None] + least[0][:, None]
        rows = blocks.reshape(prod(lead), -1)
        return rows[:, : prod(shape)].reshape(*lead, *shape)


def _from_least(blocks: Any, bits: int) -> tuple[Any, Any, Any]:
    """Codes from 0 to 2**bits - 1, the step between codes, and the value of code 0."""
    largest = np.float32(2**bits - 1)
    least = jnp.min(blocks, axis=1)
    scales = (jnp.max(blocks, axis=1) - least) / largest
    safe = jnp.where(scales > 0, scales, jnp.ones_like(scales))
    codes = jnp.round((blocks - least[:, None]) * (1 / safe)[:, None])
    codes = jnp.clip(codes, 0, largest).astype(jnp.uint8)
    return codes if bits == 8 else _packed(codes), scales, least


def _packed(codes: Any) -> Any:
    """Codes of 4 bits packed two a byte, the first in the high half."""
    return (codes[:, 0::2] << 4) | codes[:, 1::2]


def _unpacked(codes: Any) -> Any:
    return jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(codes.shape[0], -1)


def _nf4(blocks: Any) -> tuple[Any, Any]:
    """NF4 codes, two a byte with the first in the high half, and scales of blocks."""
    scales = jnp.max(jnp.abs(blocks), axis=1)
    safe = jnp.where(scales > 0, scales, jnp.ones_like(scales))
    # bitsandbytes multiplies by the reciprocal.
    values = blocks * (1 / safe)[:, None]
    codes = jnp.searchsorted(jnp.asarray(BORDERS), values, side="left")
    return _packed(codes.astype(jnp.uint8)), scales
