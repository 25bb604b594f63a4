"""What numba lacks for kernels on floats: fused multiply-adds, bfloat16 and float16.

The short floats are their bits, uint16, to numba. Each function is a few instructions
of LLVM, which its vectoriser widens. Written in numba's own integers the conversions
would take place in 64 bits, and twice as long.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
HALF = ir.HalfType()
FLOAT = ir.FloatType()


def inlined(build: Any) -> Any:
    """`intrinsic`; a type checker would take its first parameter for the caller's."""
    return intrinsic(build)


@inlined
def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
    """`x * y + z` in float32, rounded once where the processor can, as most can.

    Numba's `fastmath={"contract"}` fuses as well, but of two products that are added
    the compiler chooses the one that it does not round.
    """

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        signature = ir.FunctionType(FLOAT, [FLOAT] * 3)
        name = "llvm.fmuladd"
        function = builder.module.declare_intrinsic(name, [FLOAT], signature)
        return builder.call(function, arguments)

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
