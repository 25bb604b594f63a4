"""What the parts of an array are sent as between devices, if not as they are."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

from zinf_kernels.quantize import Quantized, dequantize, quantize

# With fewer numbers for a scale of four bytes, bytes would hardly be saved.
MIN_ROW = 16


@dataclass(frozen=True)
class Blocks:
    """8-bit integers in blocks, each with a float32 scale (ZeRO++'s qwZ).

    A number is rounded by at most its block's largest magnitude over 254. A block is
    within one row of the leading dim, so that a leaf is rounded in the same way whether
    it is gathered as a whole, by layer or by tile. It is within the part of one device,
    so another number of devices rounds differently.

    Attributes:
        block_size: most numbers in a block; even.
    """

    block_size: int = 256

    def is_worth_it(self, shape: tuple[int, ...]) -> bool:
        """Whether encoding a part of this shape saves most of its bytes."""
        return _row_size(shape) >= MIN_ROW

    def encode(
        self, part: Float[Array, "..."]
    ) -> tuple[Int8[Array, "blocks width"], Float32[Array, " blocks"]]:
        """A device's part as it is sent: integers and scales. Traceable."""
        rows = part.reshape(-1, _row_size(part.shape))
        num_blocks, width = self._blocks(rows.shape[1])
        filled = jnp.pad(rows, [(0, 0), (0, num_blocks * width - rows.shape[1])])
        sent = quantize(filled, block_size=width)
        return sent.values, sent.scales

    def decode(
        self, sent: Any, shape: tuple[int, ...], dtype: Any
    ) -> Float[Array, "parts ..."]:
        """The parts of all devices, from what they sent; traceable.

        Args:
            sent: what `encode` returns, with a leading dim for the devices.
            shape: of the part of one device.
        """
        values, scales = sent
        row_size = _row_size(shape)
        num_blocks, width = self._blocks(row_size)
        values, scales = values.reshape(-1, width), scales.reshape(-1)
        flat = dequantize(Quantized(values, scales, (values.size,), dtype, 8))
        rows = flat.reshape(-1, num_blocks * width)[:, :row_size]
        return rows.reshape(-1, *shape)

    def _blocks(self, row_size: int) -> tuple[int, int]:
        """The number of blocks of a row, and the numbers in each, filled up."""
        num_blocks = -(-row_size // self.block_size)
        width = -(-row_size // num_blocks)
        return num_blocks, width + width % 2


def _row_size(shape: tuple[int, ...]) -> int:
    """Numbers in one row of the leading dim; all of them if there is no other dim."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)
