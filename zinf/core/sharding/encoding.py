"""What the parts of an array are sent as between devices, if not as they are."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int16

from zinf_kernels.quantize import Quantized, dequantize, quantize

# With fewer numbers for a scale of four bytes, bytes would hardly be saved.
MIN_ROW = 16
# The largest magnitude of 4-bit integers; symmetric.
LARGEST = 7


@dataclass(frozen=True)
class Blocks:
    """8-bit integers in blocks, each with a float32 scale (ZeRO++'s qwZ).

    A number is rounded by at most its block's largest magnitude over 254. A block is
    within one row of the leading dim, so that a leaf is rounded in the same way whether
    it is gathered as a whole, by layer or by tile. It is within the part of one device,
    so another number of devices rounds differently.

    [Note: rounded once] A part in bfloat16 or float16 that was decoded is encoded as
    before, bit for bit: the largest number of a block, which makes the scale, decodes
    to itself, and all others to less than half a scale from where they were.

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
        blocks = self._filled(part)
        sent = quantize(blocks, block_size=blocks.shape[1])
        return sent.values, sent.scales

    def encode_all(self, parts: Float[Array, "parts ..."]) -> Any:
        """Several parts of one shape as one, each in blocks of its own; traceable."""
        return self.encode(parts.reshape(-1, _row_size(parts.shape[1:])))

    def decode(
        self, sent: Any, shape: tuple[int, ...], dtype: Any
    ) -> Float[Array, "parts ..."]:
        """The parts of all devices, from what they sent; traceable.

        Args:
            sent: what `encode` or `encode_all` returns, with a leading dim for the
                devices.
            shape: of one part.
        """
        values, scales = sent
        _, width = self._blocks(_row_size(shape))
        values, scales = values.reshape(-1, width), scales.reshape(-1)
        flat = dequantize(Quantized(values, scales, (values.size,), dtype, 8))
        return self._unfilled(flat, shape)

    def _filled(self, part: Any) -> Float[Array, "blocks width"]:
        """The blocks of a part, of which the last of each row is filled with zeros."""
        rows = part.reshape(-1, _row_size(part.shape))
        num_blocks, width = self._blocks(rows.shape[1])
        filled = jnp.pad(rows, [(0, 0), (0, num_blocks * width - rows.shape[1])])
        return filled.reshape(-1, width)

    def _unfilled(self, blocks: Any, shape: tuple[int, ...]) -> Any:
        """Parts of this shape, (parts, ...), from their blocks."""
        row_size = _row_size(shape)
        num_blocks, width = self._blocks(row_size)
        rows = blocks.reshape(-1, num_blocks * width)[:, :row_size]
        return rows.reshape(-1, *shape)

    def _blocks(self, row_size: int) -> tuple[int, int]:
        """The number of blocks of a row, and the numbers in each, filled up."""
        num_blocks = -(-row_size // self.block_size)
        width = -(-row_size // num_blocks)
        return num_blocks, width + width % 2


@dataclass(frozen=True)
class Nibbles(Blocks):
    """4-bit integers in blocks, each with a bfloat16 scale (ZeRO++'s qgZ).

    For each block, scale = max |x| * (1 / 7) in bfloat16, and value = x * (1 / scale),
    rounded to the nearest, ties to even. A number is rounded by at most half a scale:
    1/14 of its block's largest magnitude, up to the rounding of the scale (a factor of
    1 + 2^-8). value * scale has 11 significant bits, so it is exact in float32: sums of
    decoded parts have the same bits on every machine, whether or not its compiler
    contracts products and sums.

    With error feedback (LoCo, arXiv:2407.04480), what is lost is added to what is sent
    next: x + e is sent in place of x, and e becomes beta * e + (1 - beta) * (what was
    lost), as DeepSpeed computes it.

    A block whose scale would be below the least normal bfloat16 becomes zeros; one with
    a NaN or an infinity becomes NaNs.

    Attributes:
        err_beta: beta of the error feedback; None: there is none.
    """

    err_beta: float | None = None

    def new_error(self, error: Any, lost: Any) -> Any:
        """The error after a number was sent; it forgets what is not finite."""
        assert self.err_beta is not None
        new = self.err_beta * error + (1 - self.err_beta) * lost
        return jnp.where(jnp.isfinite(new), new, 0)

    def encode(
        self, part: Float[Array, "..."]
    ) -> tuple[Int8[Array, "blocks half"], Int16[Array, " blocks"]]:
        """A part as it is sent: byte i of a block holds number i in its lower half, and
        number width / 2 + i in its upper half; the bits of scales. Traceable."""
        blocks = self._filled(part).astype(jnp.float32)
        # XLA may divide by a constant, or by a number for many, by way of a reciprocal.
        # It may drop a cast to bfloat16 and back, and never a reduction of precision.
        scales = jnp.abs(blocks).max(1) * jnp.float32(1 / LARGEST)
        scales = jax.lax.reduce_precision(scales, 8, 7)
        is_zero = (scales < jnp.finfo(jnp.bfloat16).tiny)[:, None]
        inverse = 1 / jnp.where(is_zero, 1, scales[:, None])
        values = jnp.round(blocks * inverse)
        values = jnp.where(is_zero, 0, values).astype(jnp.int8)
        low, high = jnp.split(values, 2, axis=1)
        # XLA:CPU sends bfloat16 as float32, and integers as they are.
        bits = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.int16)
        return (low & 15) | (high << 4), bits

    def decode(
        self, sent: Any, shape: tuple[int, ...], dtype: Any
    ) -> Float[Array, "parts ..."]:
        values, scales = sent
        _, width = self._blocks(_row_size(shape))
        values = values.reshape(-1, width // 2)
        scales = jax.lax.bitcast_convert_type(scales.reshape(-1, 1), jnp.bfloat16)
        pairs = (values << 4) >> 4, values >> 4
        numbers = jnp.concatenate(pairs, axis=1).astype(jnp.float32)
        return self._unfilled(numbers * scales.astype(jnp.float32), shape).astype(dtype)


def _row_size(shape: tuple[int, ...]) -> int:
    """Numbers in one row of the leading dim; all of them if there is no other dim."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)
