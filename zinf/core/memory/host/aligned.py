"""Host memory that devices, drives and XLA can use without copying it first."""

from math import prod

import numpy as np
from numpy.typing import DTypeLike

from zinf.core.memory.host.pool import POOL

# XLA's CPU backend takes memory of this alignment as it is, and copies other memory.
ALIGNMENT = 64
# O_DIRECT and page pinning need whole pages; small arrays are not worth the padding.
PAGE_BYTES = 4096
PAGED_FROM_BYTES = 2**20
# Arrays of this size or more get memory from the pool. malloc would give large blocks
# back to the system each time, and the first touch of new pages costs more time than a
# drive takes to fill them. Layers of SmolLM2-135M, whose matrices have 0.4 to 3.5 MB,
# were read at 1.2 GB/s when the pool began at 4 MiB, and are at 2.2 of a drive's 3.5.
POOLED_FROM_BYTES = 2**18


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array at a 64-byte boundary.

    An array of 1 MiB or more begins at a page, so that drives need no copy of it. An
    array of 256 KiB or more is on huge pages of the pool, which reuses them when
    nothing refers to the array any more.
    """
    dtype = np.dtype(dtype)
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= POOLED_FROM_BYTES:
        return np.ndarray(shape, dtype, buffer=POOL.take(nbytes))
    alignment = alignment_of(nbytes)
    memory = np.empty(nbytes + alignment, np.uint8)
    offset = -address(memory) % alignment
    return np.ndarray(shape, dtype, buffer=memory, offset=offset)


def aligned_copy(value: np.ndarray) -> np.ndarray:
    """A copy of `value` in memory of its own from `aligned_empty`."""
    copy = aligned_empty(value.shape, value.dtype)
    np.copyto(copy, value)
    return copy


def alignment_of(nbytes: int) -> int:
    """The alignment in bytes that an array of `nbytes` gets."""
    return ALIGNMENT if nbytes < PAGED_FROM_BYTES else PAGE_BYTES


def address(array: np.ndarray) -> int:
    """The memory address of the first element of `array`."""
    return array.__array_interface__["data"][0]
