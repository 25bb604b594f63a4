"""Adam on the host, in place: one pass over memory, compiled by numba.

An update reads 16 bytes an element, writes 12, and takes as long as the reads alone
(scripts/bench/bench_adam.py). So the time depends on three things only: nothing is read
twice, no page is newly mapped, and the loop is vectorised.

[Note: the bits of optax] Operations and their order are those of XLA:CPU (jax 0.10 and
0.12) for `optax.adamw` under jit, whose gradient is multiplied by a factor first. A
division by a bias correction is a product with its inverse. Of two products that are
added, one is rounded and the other is fused into the sum. LLVM chooses which for XLA,
and this file repeats its choice (with float16 gradients the choice depends on the
length). This costs no time.
"""

from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from numba import float32, intp, njit, types, uint16

from zinf_kernels.adam.arguments import Arrays, Scalars
from zinf_kernels.arrays import BFLOAT16, elements_before_line
from zinf_kernels.float_ops import FORMATS, fused, seen
from zinf_kernels.threads import for_blocks

ZERO = np.float32(0)
ONE = np.float32(1)
# XLA:CPU flushes smaller numbers to zero. The moments of a token that no longer occurs
# decay into that range, where an update takes 1.6 times as long on Zen 4.
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
NO_COPY = np.empty(0, np.uint16)
COMPILING = Lock()


def adam_update(arrays: Arrays, scalars: Scalars, *, num_threads: int | None) -> None:
    """Updates blocks of the arrays on up to `num_threads` threads."""
    copy_dtype = None if arrays.copy is None else arrays.copy.dtype
    has_decay = bool(scalars.weight_decay != 0)
    with COMPILING:
        kernel = compiled(arrays.m.dtype, arrays.gradient.dtype, copy_dtype, has_decay)
    copy = NO_COPY if arrays.copy is None else arrays.copy
    views = [seen(a) for a in (arrays.master, arrays.m, arrays.v, arrays.gradient)]
    numbers = (
        scalars.factor,
        scalars.b1,
        scalars.one_minus_b1,
        scalars.b2,
        scalars.one_minus_b2,
        ONE / scalars.correction1,
        ONE / scalars.correction2,
        scalars.eps,
        scalars.eps_root,
        scalars.weight_decay,
        -scalars.learning_rate,
    )

    def update(start: int, stop: int) -> None:
        kernel(*views, seen(copy), start, stop, *numbers)

    lead = elements_before_line(arrays.master)
    if lead:
        update(0, lead)
    for_blocks(update, start=lead, stop=arrays.master.size, num_threads=num_threads)


@cache
def compiled(
    m_dtype: np.dtype,
    gradient_dtype: np.dtype,
    copy_dtype: np.dtype | None,
    has_decay: bool,
) -> Callable[..., None]:
    """The loop for arrays of these dtypes, in about 0.2 s (the first one 0.8 s).

    It is not cached on disk: a cache needs a writable folder, one for each kind of
    processor.
    """
    m_type, widen_m, narrow_m = FORMATS[m_dtype]
    gradient_type, widen_gradient, _ = FORMATS[gradient_dtype]
    # LLVM's choice for XLA if the gradient is widened and scaled just before.
    fuse_gradient = gradient_dtype != BFLOAT16 or m_dtype == BFLOAT16
    has_copy = copy_dtype is not None
    _, _, narrow_copy = FORMATS[copy_dtype or BFLOAT16]

    def loop(
        master: Any,
        m: Any,
        v: Any,
        gradient: Any,
        copy: Any,
        start: Any,
        stop: Any,
        factor: Any,
        b1: Any,
        one_minus_b1: Any,
        b2: Any,
        one_minus_b2: Any,
        inverse1: Any,
        inverse2: Any,
        eps: Any,
        eps_root: Any,
        weight_decay: Any,
        minus_rate: Any,
    ) -> None:
        # Slices, because numba sees that no index from 0 to a length is negative; a
        # check for that in each iteration would keep the loop scalar.
        master, m, v = master[start:stop], m[start:stop], v[start:stop]
        gradient, copy = gradient[start:stop], copy[start:stop]
        for i in range(master.size):
            g = widen_gradient(gradient[i]) * factor
            if fuse_gradient:
                new_m = fused(one_minus_b1, g, b1 * widen_m(m[i]))
            else:
                new_m = fused(b1, widen_m(m[i]), one_minus_b1 * g)
            new_v = fused(b2, v[i], one_minus_b2 * (g * g))
            # This comparison keeps a NaN.
            new_m = ZERO if abs(new_m) < SMALLEST_NORMAL else new_m
            new_v = ZERO if new_v < SMALLEST_NORMAL else new_v
            m[i] = narrow_m(new_m)
            v[i] = new_v
            root = np.sqrt(fused(new_v, inverse2, eps_root))
            change = new_m * inverse1 / (root + eps)
            old = master[i]
            if has_decay:
                change = fused(weight_decay, old, change)
            new = fused(minus_rate, change, old)
            master[i] = new
            if has_copy:
                copy[i] = narrow_copy(new)

    gradients = types.Array(gradient_type, 1, "C", readonly=True)
    arrays = (float32[::1], m_type[::1], float32[::1], gradients, uint16[::1])
    signature = (*arrays, intp, intp, *[float32] * 11)
    # No fastmath: NaNs and infinities stay, and nothing here is faster with it. The
    # "numpy" model divides by zero without a branch.
    return njit([signature], nogil=True, error_model="numpy")(loop)
