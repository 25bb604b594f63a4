"""Numbers to integers: the arithmetic that the kernel and the reference share.

Written in operations that Mosaic GPU has too (no floor, no modulo), each exact or
rounded once, so that implementations agree to the bit wherever their divisions do.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from zinf_kernels.quantize.blocks import LARGEST

SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
ONE = np.float32(1)
INFINITY = np.float32(np.inf)


def scale_and_inverse(x: Any, *, bits: int) -> tuple[Any, Any]:
    """float32 scales of blocks (the rows of `x`) and their inverses.

    A block with a NaN or an infinity has a scale of NaN, which shows, and an inverse of
    zero.
    """
    # NaNs as infinities: XLA:CPU (jax 0.10.2 and 0.12.0) loses them in the maxima of a
    # matrix of 64 x 128, and keeps them in those of 8 x 128.
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < INFINITY, magnitude, INFINITY)
    absmax = jnp.max(magnitude, axis=1)
    scale = absmax * np.float32(1 / LARGEST[bits])
    is_normal = (scale >= SMALLEST_NORMAL) & (scale < INFINITY)
    # Divides by one where the inverse is unused, so that nothing divides by zero.
    inverse = jnp.where(is_normal, ONE / jnp.where(is_normal, scale, ONE), ONE * 0)
    # Zero for what is finite but not normal.
    return jnp.where(is_normal, scale, absmax - absmax), inverse


def to_integers(scaled: Any, random: Any | None, *, bits: int) -> Any:
    """int32 of float32 numbers: the nearest, or up where `random` says so.

    Args:
        scaled: within the range up to rounding; NaNs give any value.
        random: uint32, or None to round to the nearest.
    """
    whole = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    if random is not None:
        whole = jnp.where(whole > scaled, whole - ONE, whole)
        # The upper 24 bits, which float32 holds exactly. Comparing them with the exact
        # fraction leaves whole numbers alone; floor(scaled + u) would move some.
        u = (random >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32)
        u = u * np.float32(2**-24)
        whole = jnp.where(u < scaled - whole, whole + ONE, whole)
    largest = np.float32(LARGEST[bits])
    # Rounding of scale and product may lead out by one; NaNs would be undefined as
    # integers, and comparisons send them to an end of the range.
    whole = jnp.where(whole < largest, whole, largest)
    return jnp.where(whole > -largest, whole, -largest).astype(jnp.int32)


def random_bits(index: Any, seed0: Any, seed1: Any) -> Any:
    """uint32 that look random, one for each index: Wellons's lowbias32, seeded twice.

    A dozen integer operations. Threefry's hundred would take longer than reading the
    array.
    """
    x = index ^ seed0
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) + seed1
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def packed(integers: Any) -> Any:
    """Two halves of each row of 4-bit integers as one row of bytes, in int32."""
    half = integers.shape[-1] // 2
    lower, upper = integers[:, :half], integers[:, half:]
    return (lower & np.int32(15)) | (upper << np.int32(4))


def unpacked(integers: Any) -> tuple[Any, Any]:
    """Both halves of what `packed` made, from int32 of its bytes."""
    lower = (integers << np.int32(28)) >> np.int32(28)
    return lower, integers >> np.int32(4)
