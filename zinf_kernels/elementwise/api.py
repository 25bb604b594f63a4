"""`elementwise_update`: signature, checks and choice of implementation."""

from collections.abc import Sequence

import numpy as np

from zinf_kernels.arrays import check_apart, check_array
from zinf_kernels.dispatch import Implementation, choose
from zinf_kernels.elementwise import reference
from zinf_kernels.elementwise.program import Program


def _on_cpu(
    program: Program,
    arrays: Sequence[np.ndarray],
    scalars: Sequence[np.float32],
    *,
    num_threads: int | None,
) -> None:
    # Numba takes as long to import as jax, and many runs update on the device.
    from zinf_kernels.elementwise.cpu import elementwise_update

    elementwise_update(program, arrays, scalars, num_threads=num_threads)


EXISTING = {"cpu": _on_cpu, "reference": reference.elementwise_update}


def elementwise_update(
    program: Program,
    arrays: Sequence[np.ndarray],
    scalars: Sequence[np.float32],
    *,
    num_threads: int | None = None,
    implementation: Implementation = None,
) -> None:
    """Runs a program on every element of some arrays, in place, in one pass.

    Rounding: each operation is rounded to float32, to nearest with ties to even, and
    numbers below 2**-126 count as zero, as with XLA:CPU. Fused operations are rounded
    once if the processor has them, and most have. So all implementations give the same
    bits, with two exceptions: one in 2**29 fused operations, which the reference rounds
    twice, and the payload of NaNs.

    Args:
        arrays: contiguous 1-D NumPy arrays of one length, of the dtypes of the program,
            that share no memory.
        scalars: in float32.
        num_threads: most threads to use, by default one for each core that the process
            may use. Changes no bit of the results.
        implementation: "cpu", "reference", or names in order of preference.

    Raises:
        ValueError: an array has the wrong dtype, length or layout, is read-only though
            the program writes it, or shares memory with another; or there are more or
            fewer arrays or scalars than the program has.
    """
    update = choose(implementation, op="elementwise_update", existing=EXISTING)
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}. Pass at least 1, or None.")
    given, wanted = len(arrays), len(program.arrays)
    if (given, len(scalars)) != (wanted, program.num_scalars):
        raise ValueError(
            f"The program works on {wanted} arrays and {program.num_scalars} scalars, "
            f"but {given} and {len(scalars)} are given."
        )
    named = {f"array {number}": array for number, array in enumerate(arrays)}
    written = {f"array {number}" for number, _ in program.outputs}
    for (name, array), dtype in zip(named.items(), program.arrays, strict=True):
        check_array(name, array, dtypes=(dtype,), is_written=name in written)
    check_apart(named)
    update(program, arrays, scalars, num_threads=num_threads)
