"""Makes the processor treat subnormal floats as zero, as XLA:CPU does.

An operation with subnormals takes a hundred cycles, and a number that is zero for XLA
may still have a sign, which moves a parameter by a whole step of Lion. Zeroing each
result in the loop instead made loops in the cache take two to three times as long.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from zinf_kernels.float_ops import inlined
from zinf_kernels.processor import ARM, X86

INT8, INT32, INT64 = (ir.IntType(n) for n in (8, 32, 64))
# Flush results to zero, and take operands for zero.
X86_BITS = 1 << 15 | 1 << 6
ARM_BITS = 1 << 24


@inlined
def flush_subnormals(_: Any) -> Any:
    """Starts flushing on this thread; returns the state for `restore`."""

    def build(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        before = _control(builder)
        bits = X86_BITS if platform.machine() in X86 else ARM_BITS
        _set_control(builder, builder.or_(before, INT64(bits)))
        return before

    return types.uint64(), build


@inlined
def restore(_: Any, before: Any) -> Any:
    """Returns this thread to the state before `flush_subnormals`."""

    def build(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        _set_control(builder, arguments[0])
        return None

    return types.void(types.uint64), build


def _control(builder: Any) -> Any:
    """The floating-point control register of the thread."""
    if platform.machine() in X86:
        slot = cgutils.alloca_once(builder, INT32)
        _call_with_slot(builder, "llvm.x86.sse.stmxcsr", slot)
        return builder.zext(builder.load(slot), INT64)
    _check_is_arm()
    return builder.call(_intrinsic(builder, "llvm.aarch64.get.fpcr", INT64), [])


def _set_control(builder: Any, value: Any) -> None:
    if platform.machine() in X86:
        slot = cgutils.alloca_once(builder, INT32)
        builder.store(builder.trunc(value, INT32), slot)
        _call_with_slot(builder, "llvm.x86.sse.ldmxcsr", slot)
        return
    _check_is_arm()
    name = "llvm.aarch64.set.fpcr"
    builder.call(_intrinsic(builder, name, ir.VoidType(), INT64), [value])


def _call_with_slot(builder: Any, name: str, slot: Any) -> None:
    pointer = INT8.as_pointer()
    function = _intrinsic(builder, name, ir.VoidType(), pointer)
    builder.call(function, [builder.bitcast(slot, pointer)])


def _intrinsic(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    signature = ir.FunctionType(result, operands)
    return cgutils.get_or_insert_function(builder.module, signature, name)


def _check_is_arm() -> None:
    if platform.machine() not in ARM:
        raise NotImplementedError(
            f"Kernels on the host know x86 and ARM, not {platform.machine()}. Keep "
            "optimizer states on the device, or add the processor to "
            "zinf_kernels/subnormals.py."
        )
