"""Operations that numba lacks: fused multiply-adds, selects, bfloat16 and float16.

Numba sees short floats as their bits, uint16. Each function is a few instructions of
LLVM, which LLVM vectorises. Written with numba's own integers, conversions would be in
64 bits and take twice as long.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import float32, types, uint16
from numba.extending import intrinsic, register_jitable

from zinf_kernels.arrays import BFLOAT16, FLOAT16, FLOAT32

INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
HALF = ir.HalfType()
FLOAT = ir.FloatType()


def inlined(build: Any) -> Any:
    """`numba.extending.intrinsic`, behind a function for the type checker.

    A checker would take the first parameter of `build` for the caller's.
    """
    return intrinsic(build)


@inlined
def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
    """`x * y + z` in float32, rounded once if the processor has FMA, as most have.

    Numba's `fastmath={"contract"}` fuses as well, but of two products that are added
    the compiler chooses the one that it does not round.
    """

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.fmuladd", arguments)

    return types.float32(*[types.float32] * 3), build


@inlined
def from_bfloat16(_: Any, bits: Any) -> Any:
    """float32 of the bits of a bfloat16: its upper half."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        wide = builder.zext(arguments[0], INT32)
        return builder.bitcast(builder.shl(wide, INT32(16)), FLOAT)

    return types.float32(types.uint16), build


@inlined
def to_bfloat16(_: Any, number: Any) -> Any:
    """Bits of the bfloat16 nearest to a float32, ties to even; NaNs stay NaNs."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], INT32)
        upper = builder.lshr(bits, INT32(16))
        # Half a unit, less one bit unless the kept part is odd; a carry may run into
        # the exponent, and to infinity, as it should.
        odd = builder.and_(upper, INT32(1))
        half = builder.add(odd, INT32(0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), INT32(16))
        # A NaN whose set bits are all in the lower half would become infinity.
        quiet = builder.or_(upper, INT32(0x40))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.trunc(builder.select(is_nan, quiet, rounded), INT16)

    return types.uint16(types.float32), build


@inlined
def from_float16(_: Any, bits: Any) -> Any:
    """float32 of the bits of a float16."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], HALF), FLOAT)

    return types.float32(types.uint16), build


@inlined
def to_float16(_: Any, number: Any) -> Any:
    """Bits of the float16 nearest to a float32, ties to even."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], HALF), INT16)

    return types.uint16(types.float32), build


@inlined
def sign(_: Any, number: Any) -> Any:
    """1 or -1; zeros and NaNs are returned as they are."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        has_sign = builder.fcmp_ordered("!=", arguments[0], FLOAT(0))
        one = _call(builder, "llvm.copysign", [FLOAT(1), arguments[0]])
        return builder.select(has_sign, one, arguments[0])

    return types.float32(types.float32), build


@inlined
def maximum(_: Any, x: Any, y: Any) -> Any:
    """The larger of two float32; NaN if one of them is."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.maximum", arguments)

    return types.float32(*[types.float32] * 2), build


@inlined
def minimum(_: Any, x: Any, y: Any) -> Any:
    """The smaller of two float32; NaN if one of them is."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.minimum", arguments)

    return types.float32(*[types.float32] * 2), build


@inlined
def select(_: Any, condition: Any, x: Any, y: Any) -> Any:
    """`x if condition else y`, without a branch, which would keep a loop scalar."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return types.float32(types.boolean, *[types.float32] * 2), build


@register_jitable
def _same(number: Any) -> Any:
    return number


class Format(NamedTuple):
    """How numba sees the elements of an array, and how they become float32 and back."""

    seen: Any
    widen: Any
    narrow: Any


FORMATS = {
    FLOAT32: Format(float32, _same, _same),
    BFLOAT16: Format(uint16, from_bfloat16, to_bfloat16),
    FLOAT16: Format(uint16, from_float16, to_float16),
}


def seen(array: np.ndarray) -> np.ndarray:
    """An array as numba sees it."""
    return array if array.dtype == FLOAT32 else array.view(np.uint16)


def _call(builder: Any, name: str, arguments: Any) -> Any:
    signature = ir.FunctionType(FLOAT, [FLOAT] * len(arguments))
    return builder.call(
        builder.module.declare_intrinsic(name, [FLOAT], signature), arguments
    )
