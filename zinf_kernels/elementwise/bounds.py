"""Bounds on the rounding error of a program.

Running error analysis (Higham 2002, section 3.3): each value in float64, which is exact
enough here, carries a bound of its error in float32, whichever products are fused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from zinf_kernels.elementwise.program import Program

# Half a unit in the last place of 1 in float32.
ROUNDING = 2.0**-24
# XLA improves an estimate of reciprocal roots: 2.4 roundings, measured on AVX-512.
RSQRT_ROUNDINGS = 4
# Smaller results become zero.
SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Bounded:
    """Values and a bound of each one's error; for booleans, whether it may be wrong."""

    value: Any
    error: Any


def error_bounds(
    program: Program, arrays: Sequence[np.ndarray], scalars: Sequence[np.float32]
) -> list[np.ndarray]:
    """For each output, how far an implementation may be from exact arithmetic.

    Two implementations may be twice that apart. A bound is NaN where the output is.
    """
    inputs = [Bounded(np.asarray(x, np.float64), 0.0) for x in (*arrays, *scalars)]
    with np.errstate(all="ignore"):
        values = program.evaluate(OPERATIONS, inputs)
        bounds = []
        for array, number in program.outputs:
            stored = values[number]
            rounding = float(ml_dtypes.finfo(program.arrays[array]).eps) / 2
            bounds.append(stored.error + rounding * np.abs(stored.value))
    return bounds


def _rounded(value: Any, error: Any, roundings: int = 1) -> Bounded:
    return Bounded(
        value, error + roundings * ROUNDING * np.abs(value) + SMALLEST_NORMAL
    )


def _add(x: Bounded, y: Bounded) -> Bounded:
    return _rounded(x.value + y.value, x.error + y.error)


def _negative(x: Bounded) -> Bounded:
    return Bounded(-x.value, x.error)


def _sub(x: Bounded, y: Bounded) -> Bounded:
    return _add(x, _negative(y))


def _mul(x: Bounded, y: Bounded) -> Bounded:
    error = np.abs(x.value) * y.error + np.abs(y.value) * x.error + x.error * y.error
    return _rounded(x.value * y.value, error)


def _div(x: Bounded, y: Bounded) -> Bounded:
    value = x.value / y.value
    smallest = np.maximum(np.abs(y.value) - y.error, 0)
    # Two roundings: compilers may multiply by the inverse.
    return _rounded(value, (x.error + np.abs(value) * y.error) / smallest, 2)


def _sqrt(x: Bounded) -> Bounded:
    value = np.sqrt(x.value)
    return _rounded(value, value - np.sqrt(np.maximum(x.value - x.error, 0)))


def _rsqrt(x: Bounded) -> Bounded:
    value = 1 / np.sqrt(x.value)
    largest = 1 / np.sqrt(np.maximum(x.value - x.error, 0))
    return _rounded(value, largest - value, RSQRT_ROUNDINGS)


def _sign(x: Bounded) -> Bounded:
    may_change = (np.abs(x.value) <= x.error) & (x.error > 0)
    return Bounded(np.sign(x.value), np.where(may_change, 2.0, 0.0))


def _either(function: Callable[..., Any]) -> Callable[[Bounded, Bounded], Bounded]:
    """The bound of an operation whose result is one of its operands."""
    return lambda x, y: Bounded(
        function(x.value, y.value), np.maximum(x.error, y.error)
    )


def _comparison(function: Callable[..., Any]) -> Callable[[Bounded, Bounded], Bounded]:
    def compare(x: Bounded, y: Bounded) -> Bounded:
        error = x.error + y.error
        may_change = (np.abs(x.value - y.value) <= error) & (error > 0)
        return Bounded(function(x.value, y.value), may_change)

    return compare


def _truth(function: Callable[..., Any]) -> Callable[..., Bounded]:
    return lambda *truths: Bounded(
        function(*(t.value for t in truths)),
        np.any(np.broadcast_arrays(*(t.error for t in truths)), axis=0),
    )


def _select(condition: Bounded, x: Bounded, y: Bounded) -> Bounded:
    error = np.where(condition.value, x.error, y.error)
    other = np.abs(x.value - y.value) + x.error + y.error
    return Bounded(
        np.where(condition.value, x.value, y.value),
        np.where(condition.error, other, error),
    )


OPERATIONS = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    # Bounded as if the product were rounded, which holds if it is fused too.
    "fused_add": lambda x, y, z: _add(_mul(x, y), z),
    "fused_sub": lambda x, y, z: _sub(_mul(x, y), z),
    "fused_from": lambda x, y, z: _sub(z, _mul(x, y)),
    "neg": _negative,
    "abs": lambda x: Bounded(np.abs(x.value), x.error),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "sign": _sign,
    "max": _either(np.maximum),
    "min": _either(np.minimum),
    "gt": _comparison(np.greater),
    "ge": _comparison(np.greater_equal),
    "lt": _comparison(np.less),
    "le": _comparison(np.less_equal),
    "eq": _comparison(np.equal),
    "ne": _comparison(np.not_equal),
    "and_": _truth(np.logical_and),
    "or_": _truth(np.logical_or),
    "not_": _truth(np.logical_not),
    "select": _select,
}
