"""Named updates for tests and benchmarks: those in host memory, and other lengths."""

from collections.abc import Iterator

import numpy as np

from zinf_kernels.adam.arguments import BFLOAT16, FLOAT32
from zinf_kernels.adam.cases import Case
from zinf_kernels.adam.cases import cases as host_cases


def cases() -> Iterator[Case]:
    """All that changes formulas, every dtype, lengths of one tile and of several."""
    left_out = ("length", "float32_short", "float16_short")
    yield from (case for case in host_cases() if not case.name.startswith(left_out))
    for numel in (0, 1024, 5 * 1024 + 1):
        yield Case(f"length_{numel}", numel, BFLOAT16, copy_dtype=BFLOAT16)


def benchmark_cases(numel: int) -> Iterator[Case]:
    """Streamed state, without and with mixed precision."""
    yield Case("float32", numel)
    yield Case("bfloat16", numel, BFLOAT16, copy_dtype=BFLOAT16)
    yield Case("short_moment", numel, BFLOAT16, BFLOAT16, BFLOAT16)


def bytes_moved(case: Case) -> int:
    """Bytes of device memory that no update can do without reading or writing."""
    per_element = case.gradient_dtype.itemsize + 2 * case.m_dtype.itemsize
    per_element += 4 * np.dtype(FLOAT32).itemsize
    per_element += 0 if case.copy_dtype is None else case.copy_dtype.itemsize
    return per_element * case.numel
