from math import prod

import pytest

from zinf.memory.chunk import MAX_CHUNK_BYTES, chunk_shape
from zinf.program import ArraySpec


def spec(*shape: int, itemsize: int = 4) -> ArraySpec:
    return ArraySpec(shape, "float32", itemsize)


@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (1024, 1024), (2**22,)])
def test_an_array_of_at_most_16_mib_is_one_chunk(shape: tuple[int, ...]) -> None:
    assert chunk_shape(spec(*shape)) == shape


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8192, 1024), (4096, 1024)),  # 32 MiB: two halves.
        ((2**23,), (2**22,)),
        # 322 MB of a prime factorisation 29 * 1733: the first even cut into 20 or more.
        ((50257, 1600), (50257 // 29, 1600)),
        # One row alone is 64 MiB.
        ((3, 4096, 4096), (1, 1024, 4096)),
    ],
)
def test_larger_arrays_are_cut_by_rows_first(shape, expected) -> None:
    assert chunk_shape(spec(*shape)) == expected


@pytest.mark.parametrize(
    ("shape", "rows_per_chunk", "expected"),
    [
        ((12, 64, 64), 1, (1, 64, 64)),
        ((12, 64, 64), 3, (3, 64, 64)),
        ((12, 64, 64), 100, (12, 64, 64)),
        ((12, 4096, 4096), 1, (1, 1024, 4096)),
        # 4 rows of 8 MiB: halved, so that no chunk crosses a multiple of 4 rows.
        ((12, 2048, 1024), 4, (2, 2048, 1024)),
        # 3 rows of 8 MiB cannot be halved, but cut in three.
        ((12, 2048, 1024), 3, (1, 2048, 1024)),
    ],
)
def test_rows_per_chunk_bounds_the_leading_dim(shape, rows_per_chunk, expected) -> None:
    assert chunk_shape(spec(*shape), rows_per_chunk=rows_per_chunk) == expected


@pytest.mark.parametrize("rows_per_chunk", [None, 1, 7, 1009])
@pytest.mark.parametrize(
    "shape", [(10_007,), (10_007, 3), (2018, 1, 1_000_003), (5, 7, 11, 13, 1_009)]
)
@pytest.mark.parametrize("itemsize", [1, 2, 8])
def test_no_chunk_is_larger_than_the_limit(shape, rows_per_chunk, itemsize) -> None:
    chunk = chunk_shape(spec(*shape, itemsize=itemsize), rows_per_chunk=rows_per_chunk)
    assert prod(chunk) * itemsize <= MAX_CHUNK_BYTES
    assert all(1 <= size <= dim for size, dim in zip(chunk, shape, strict=True))


def test_rows_that_cannot_be_cut_evenly_leave_the_cut_to_the_next_dims() -> None:
    # 1009 is prime: any even cut would make chunks of one row, 4 KiB.
    assert chunk_shape(spec(2018, 8, 1024), rows_per_chunk=1009)[0] == 1009


def test_a_dim_without_elements_has_chunks_of_one() -> None:
    assert chunk_shape(spec(0, 4)) == (1, 4)
    assert chunk_shape(spec(0, 4), rows_per_chunk=2) == (1, 4)
