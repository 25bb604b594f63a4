"""Chunks are runs of memory: in one piece each, in order, and of one size in files."""

from math import ceil, gcd, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf.core.memory.chunk import (
    LARGEST_PADDING,
    MAX_CHUNK_BYTES,
    MAX_EXCESS,
    MIN_COMMON_BYTES,
    PAGE_BYTES,
    chunk_shape,
    on_one_grid,
)
from zinf.core.memory.nvme.array import Layout
from zinf.core.program import ArraySpec


def spec(*shape: int, itemsize: int = 4) -> ArraySpec:
    return ArraySpec(shape, "float32", itemsize)


@pytest.mark.parametrize(
    ("shape", "rows_per_chunk", "expected"),
    [
        # Up to 16 MiB an array is one chunk.
        ((), None, ()),
        ((5, 7), None, (5, 7)),
        ((2**22,), None, (2**22,)),
        # One number more has no even cut: halves, of 2**21 + 1, in whole pages.
        ((2**22 + 1,), None, (2**21 + 1024,)),
        ((8192, 1024), None, (4096, 1024)),  # 32 MiB: two halves.
        # 322 MB of a prime factorisation 29 * 1733: 29 is the first even cut into 20 or
        # more. A row is 6400 bytes, so 16 rows are 25 pages: 1733 goes up to 109 * 16.
        ((50257, 1600), None, (109 * 16, 1600)),
        # One row alone is 64 MiB.
        ((3, 4096, 4096), None, (1, 1024, 4096)),
        # So are four, and one of the next dim: the cut is in the third.
        ((2, 2, 2048, 8192), None, (1, 1, 512, 8192)),
        # 1024 numbers are a page. 31 more pad 993 by less than 1/32, 32 more do not.
        ((993,), None, (1024,)),
        ((992,), None, (992,)),
        # 1000 rows of a page each need nothing.
        ((1000, 1024), None, (1000, 1024)),
        ((12, 64, 64), 1, (1, 64, 64)),
        ((12, 64, 64), 3, (3, 64, 64)),
        ((12, 64, 64), 100, (12, 64, 64)),
        ((12, 4096, 4096), 1, (1, 1024, 4096)),
        # 4 rows of 8 MiB: halved, so that no chunk crosses a multiple of 4 rows.
        ((12, 2048, 1024), 4, (2, 2048, 1024)),
        # 3 rows of 8 MiB cannot be halved, but cut in three.
        ((12, 2048, 1024), 3, (1, 2048, 1024)),
        # 1009 is prime. Rows of 64 KiB are four times the limit: as they are, rather
        # than 1009 files of a row each. Rows of 80 KiB are cut in 5, which do cross.
        ((2018, 16, 1024), 1009, (1009, 16, 1024)),
        ((2018, 20, 1024), 1009, (202, 20, 1024)),
        # Rows are never padded: the next ones follow.
        ((5000, 1), 1000, (1000, 1)),
        # A dim without elements has chunks of one.
        ((0, 4), None, (1, 4)),
        ((0, 4), 2, (1, 4)),
    ],
)
def test_the_first_dim_with_several_to_a_chunk_is_cut(shape, rows_per_chunk, expected):
    assert MAX_CHUNK_BYTES == 16 * 2**20
    assert chunk_shape(spec(*shape), rows_per_chunk=rows_per_chunk) == expected


SIZES = (0, 1, 2, 3, 5, 7, 8, 12, 13, 64, 100, 1003, 1024, 4099)
SHAPES = st.lists(st.sampled_from(SIZES), max_size=5).map(tuple)


@settings(deadline=None, max_examples=300)
@given(
    SHAPES.filter(lambda shape: prod(shape) <= 10_000),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((None, 1, 2, 7, 1009)),
    st.sampled_from((1, 16, 1000, 4096, 40_000, 2**20)),
)
def test_any_cut_is_into_runs_of_memory_within_the_limits(
    shape, itemsize, rows_per_chunk, max_bytes
):
    """With small limits, which show the same as large ones."""
    part = spec(*shape, itemsize=itemsize)
    chunk = chunk_shape(part, rows_per_chunk=rows_per_chunk, max_bytes=max_bytes)
    nbytes = prod(chunk) * itemsize
    # Ones, then a cut, then whole dims.
    inner = len(shape)
    while inner > 0 and chunk[inner - 1] == max(1, shape[inner - 1]):
        inner -= 1
    assert all(size == 1 for size in chunk[: max(0, inner - 1)])
    # Padded to whole pages, and by little, or not at all.
    for size, dim in zip(chunk, shape, strict=True):
        assert size <= max(1, dim) or nbytes % PAGE_BYTES == 0
        assert size <= max(1, dim) * (1 + LARGEST_PADDING)
    # Whether the rows are more than what one chunk could be anyway.
    must_divide = rows_per_chunk is not None and bool(shape)
    must_divide = must_divide and rows_per_chunk < shape[0]
    if must_divide and rows_per_chunk % chunk[0]:
        row_bytes = prod(max(1, dim) for dim in shape[1:]) * itemsize
        assert rows_per_chunk * row_bytes > MAX_EXCESS * max_bytes
    if must_divide and chunk[0] == rows_per_chunk > 1:
        assert nbytes <= MAX_EXCESS * max_bytes
    else:
        # A cut into nearly equal pieces may round up by one index of the dim that is
        # cut, and then by what fills the last page.
        sizes = [size for size in chunk if size > 1]
        index_bytes = nbytes // sizes[0] if sizes else 0
        limit = max(max_bytes, itemsize) + index_bytes
        assert nbytes <= limit * (1 + LARGEST_PADDING)
    # Chunks in the order of their runs are the memory in order.
    value = np.arange(prod(shape)).reshape(shape)
    runs, parts, end = list(Layout(part, chunk).runs()), [np.empty(0)], 0
    for name, start, run_bytes in runs:
        index = map(int, name.split(".")[1:])
        cut = tuple(
            slice(i * n, (i + 1) * n) for i, n in zip(index, chunk, strict=True)
        )
        parts.append(value[cut].ravel())
        assert start == end and run_bytes == parts[-1].size * itemsize
        end += run_bytes
    np.testing.assert_array_equal(np.concatenate(parts), value.ravel())
    grid = prod(ceil(dim / size) for dim, size in zip(shape, chunk, strict=True))
    assert len({name for name, _, _ in runs}) == grid


@pytest.mark.parametrize("rows_per_chunk", [None, 7, 64])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4096, 1024), (4096, 1024)),
        # Rows of 6400 bytes: 16 MiB have 2621, and 7 * 359 is the divisor below.
        ((12_565, 1600), (7 * 359, 1600)),
        ((64, 64, 64), (64, 64, 64)),
        ((5, 7), (5, 7)),
        ((96, 2**19), (8, 2**19)),
        ((1,), (1,)),
        ((12_569, 9), (12_569, 9)),
    ],
)
def test_parts_of_an_array_are_on_one_grid_unless_chunks_would_be_tiny(
    shape, expected, rows_per_chunk
):
    part = spec(*shape)
    chunk = chunk_shape(part, rows_per_chunk=rows_per_chunk, cut_dims=[0])
    assert prod(chunk) * part.itemsize <= MAX_EXCESS * MAX_CHUNK_BYTES
    if rows_per_chunk is None:
        assert chunk == expected
    if on_one_grid(part, chunk, [0]):
        assert shape[0] % chunk[0] == 0
        if rows_per_chunk is not None and chunk[0] > 1:
            assert rows_per_chunk % chunk[0] == 0 or chunk[0] >= shape[0]
        return
    # Only where every common divisor gives files of less than 1 MiB.
    common = gcd(min(rows_per_chunk or shape[0], shape[0]), shape[0])
    row_bytes = prod(shape[1:]) * part.itemsize
    for divisor in (d for d in range(1, common + 1) if common % d == 0):
        assert not MIN_COMMON_BYTES <= divisor * row_bytes <= MAX_CHUNK_BYTES


def test_a_cut_along_another_dim_is_as_ever():
    part = spec(12_565, 1600)
    assert chunk_shape(part) == chunk_shape(part, cut_dims=[1])
