"""What each operation means, in NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from zinf_kernels.arrays import FLOAT32
from zinf_kernels.elementwise.program import Program

SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


def elementwise_update(
    program: Program,
    arrays: Sequence[np.ndarray],
    scalars: Sequence[np.float32],
    *,
    num_threads: int | None,
) -> None:
    """Computes new arrays and copies them over the old ones."""
    del num_threads  # One thread: this is for tests.
    inputs = [_flushed(x.astype(FLOAT32)) for x in arrays] + list(scalars)
    with np.errstate(all="ignore"):
        values = program.evaluate(OPERATIONS, inputs)
        for array, value in program.outputs:
            arrays[array][:] = np.asarray(values[value]).astype(arrays[array].dtype)


def _flushed(x: Any) -> Any:
    """Numbers below the normal range become zeros of their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def _fused(x: Any, y: Any, z: Any) -> Any:
    # A product of two float32 is exact in float64. The sum is rounded twice, which
    # shows in one of 2**29 sums.
    wide = np.multiply(x, y, dtype=np.float64) + z
    return _flushed(wide.astype(FLOAT32))


def _sign(x: Any) -> Any:
    return np.where(np.abs(x) > 0, np.copysign(np.float32(1), x), x)


OPERATIONS = {
    "add": lambda x, y: _flushed(x + y),
    "sub": lambda x, y: _flushed(x - y),
    "mul": lambda x, y: _flushed(x * y),
    "div": lambda x, y: _flushed(x / y),
    "fused_add": _fused,
    "fused_sub": lambda x, y, z: _fused(x, y, -z),
    "fused_from": lambda x, y, z: _fused(-x, y, z),
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "sign": _sign,
    "max": np.maximum,
    "min": np.minimum,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and_": np.logical_and,
    "or_": np.logical_or,
    "not_": np.logical_not,
    "select": np.where,
}
