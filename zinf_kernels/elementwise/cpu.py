"""Loops on the host, in place: one pass over memory, compiled by numba.

AdamW reads 16 bytes an element, writes 12, and takes as long as the reads alone
(scripts/bench/bench_adam.py). So the time depends on three things only: nothing is read
twice, no page is newly mapped, and the loop is vectorised. The source of the loop is
generated from the program, because numba cannot loop over a variable number of arrays.
"""

from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from numba import float32, intp, njit, types

from zinf_kernels import float_ops
from zinf_kernels.arrays import elements_before_line
from zinf_kernels.elementwise.program import Program
from zinf_kernels.float_ops import FORMATS, seen
from zinf_kernels.subnormals import flush_subnormals, restore
from zinf_kernels.threads import for_blocks

COMPILING = Lock()

# Operations as expressions for numba.
TEMPLATES = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "fused_add": "fused({}, {}, {})",
    "fused_sub": "fused({}, {}, -{})",
    "fused_from": "fused(-{}, {}, {})",
    "neg": "-{}",
    "abs": "abs({})",
    "sqrt": "sqrt({})",
    "rsqrt": "ONE / sqrt({})",
    "sign": "sign({})",
    "max": "maximum({}, {})",
    "min": "minimum({}, {})",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "and_": "{} & {}",
    "or_": "{} | {}",
    "not_": "not {}",
    "select": "select({}, {}, {})",
}
NAMES = {
    "ONE": np.float32(1),
    "sqrt": np.sqrt,
    "flush_subnormals": flush_subnormals,
    "restore": restore,
    "fused": float_ops.fused,
    "maximum": float_ops.maximum,
    "minimum": float_ops.minimum,
    "select": float_ops.select,
    "sign": float_ops.sign,
}


def elementwise_update(
    program: Program,
    arrays: Sequence[np.ndarray],
    scalars: Sequence[np.float32],
    *,
    num_threads: int | None,
) -> None:
    """Runs the loop over blocks of the arrays on up to `num_threads` threads."""
    with COMPILING:
        loop = compiled(program)
    views = [seen(x) for x in arrays]
    written = arrays[program.outputs[0][0]]

    def update(start: int, stop: int) -> None:
        loop(start, stop, *views, *scalars)

    lead = elements_before_line(written)
    if lead:
        update(0, lead)
    for_blocks(update, start=lead, stop=written.size, num_threads=num_threads)


@cache
def compiled(program: Program) -> Callable[..., None]:
    """The loop, in 0.2 to 0.5 s (and 0.6 more for the first)."""
    written = {array for array, _ in program.outputs}
    signature = [intp, intp]
    for number, dtype in enumerate(program.arrays):
        readonly = number not in written
        signature.append(types.Array(FORMATS[dtype].seen, 1, "C", readonly=readonly))
    signature += [float32] * program.num_scalars
    names: dict[str, Any] = dict(NAMES)
    for number, dtype in enumerate(program.arrays):
        names[f"widen{number}"] = FORMATS[dtype].widen
        names[f"narrow{number}"] = FORMATS[dtype].narrow
    exec(source(program), names)
    # No fastmath: NaNs and infinities stay, and nothing here is faster with it. The
    # "numpy" model divides by zero without a branch.
    jit = njit([tuple(signature)], nogil=True, error_model="numpy")
    return jit(names["loop"])


def source(program: Program) -> str:
    """The loop as Python."""
    arrays = [f"a{k}" for k in range(len(program.arrays))]
    scalars = [f"s{k}" for k in range(program.num_scalars)]
    lines = [f"def loop(start, stop, {', '.join([*arrays, *scalars])}):"]
    # Slices, because numba sees that no index from 0 to a length is negative; a check
    # for that in each iteration would keep the loop scalar.
    lines += [f"    {a} = {a}[start:stop]" for a in arrays]
    lines.append("    before = flush_subnormals()")
    lines.append(f"    for i in range({arrays[0]}.size):")

    def define(expression: str) -> str:
        name = f"x{len(lines)}"
        lines.append(f"        {name} = {expression}")
        return name

    elements = [define(f"widen{k}({a}[i])") for k, a in enumerate(arrays)]
    meaning = {
        name: lambda *operands, template=template: define(template.format(*operands))
        for name, template in TEMPLATES.items()
    }
    values = program.evaluate(meaning, [*elements, *scalars])
    for array, value in program.outputs:
        lines.append(f"        a{array}[i] = narrow{array}({values[value]})")
    lines.append("    restore(before)")
    return "\n".join(lines)
