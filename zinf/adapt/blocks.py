"""Frozen weights in blocks of 8 or 4 bits, each with a scale.

`int8` is that of `zinf_kernels.quantize`. `nf4` is that of QLoRA
(https://arxiv.org/abs/2305.14314, section 3 and appendix E), and of bitsandbytes: the
16 values of `NF4`, times the largest magnitude of the block.

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

CODES, SCALES = "codes", "scales"
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

    name: Literal["int8", "nf4"]
    block: int
    stack: int

    @property
    def names(self) -> tuple[str, ...]:
        return CODES, SCALES

    def shapes(self, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays that a weight is stored as."""
        lead = shape[: self.stack]
        count = -(-prod(shape[self.stack :]) // self.block)
        width = self.block if self.name == "int8" else self.block // 2
        dtype = jnp.int8 if self.name == "int8" else jnp.uint8
        return {
            CODES: jax.ShapeDtypeStruct((*lead, count, width), dtype),
            SCALES: jax.ShapeDtypeStruct((*lead, count), jnp.uint32),
        }

    def encode(self, weight: Any) -> dict[str, Any]:
        """The arrays that a weight is stored as. Entries must be finite."""
        lead = weight.shape[: self.stack]
        rows = jnp.asarray(weight).astype(jnp.float32).reshape(prod(lead), -1)
        rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % self.block)))
        codes, bits = self.encode_blocks(rows.reshape(-1, self.block))
        width = codes.shape[-1]
        return {
            CODES: codes.reshape(*lead, -1, width),
            SCALES: bits.reshape(*lead, -1),
        }

    def encode_blocks(self, blocks: Any) -> tuple[Any, Any]:
        """Codes and scales of float32 [count, block]: [count, width] and [count]."""
        if self.name == "int8":
            found = quantize(blocks, block_size=self.block, implementation=CUT_BY_XLA)
            codes, scales = found.values, found.scales
        else:
            codes, scales = _nf4(blocks)
        return codes, lax.bitcast_convert_type(scales, jnp.uint32)

    def decode(self, arrays: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
        """The weight, or some rows of its stack, in float32.

        Args:
            shape: that of one row, which is all of a weight without a stack.
        """
        codes, bits = arrays[CODES], arrays[SCALES]
        lead = codes.shape[:-2]
        codes = codes.reshape(-1, codes.shape[-1])
        scales = lax.bitcast_convert_type(bits.reshape(-1), jnp.float32)
        if self.name == "int8":
            numel = codes.size
            blocks = dequantize(
                Quantized(codes, scales, (numel,), jnp.dtype(jnp.float32), 8),
                implementation=CUT_BY_XLA,
            )
        else:
            pairs = jnp.asarray(PAIRS).at[codes.astype(jnp.int32)].get(mode="clip")
            blocks = pairs.reshape(codes.shape[0], -1) * scales[:, None]
        rows = blocks.reshape(prod(lead), -1)
        return rows[:, : prod(shape)].reshape(*lead, *shape)


def _nf4(blocks: Any) -> tuple[Any, Any]:
    """Two codes a byte, the first in the high half, and the scale of each block."""
    scales = jnp.max(jnp.abs(blocks), axis=1)
    safe = jnp.where(scales > 0, scales, jnp.ones_like(scales))
    # bitsandbytes multiplies by the reciprocal.
    values = blocks * (1 / safe)[:, None]
    codes = jnp.searchsorted(jnp.asarray(BORDERS), values, side="left")
    codes = codes.astype(jnp.uint8)
    return (codes[:, 0::2] << 4) | codes[:, 1::2], scales
