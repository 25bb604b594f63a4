"""Chunks are runs of memory: in one piece each, in order, and of one size in files."""

from dataclasses import dataclass
from itertools import product
from math import ceil, gcd, prod

import numpy as np
import pytest

from zinf.memory.chunk import (
    LARGEST_PADDING,
    MAX_CHUNK_BYTES,
    MAX_EXCESS,
    MIN_COMMON_BYTES,
    PAGE_BYTES,
    chunk_shape,
    on_one_grid,
)
from zinf.program import ArraySpec

SHAPES = [
    (),
    (1,),
    (0,),
    (0, 4),
    (3, 0, 2),
    (5, 7),
    (1024,),
    (10_007,),
    (10_007, 3),
    (2018, 1, 1_003),
    (5, 7, 11, 13, 109),
    (1, 1, 70_001),
    (64, 64, 64),
    (4099, 8, 2),
]


def spec(*shape: int, itemsize: int = 4) -> ArraySpec:
    return ArraySpec(shape, "float32", itemsize)


def grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """What zarr takes for the content of each chunk."""
    cuts = [
        [slice(i * size, min((i + 1) * size, dim)) for i in range(ceil(dim / size))]
        for dim, size in zip(shape, chunk, strict=True)
    ]
    return list(product(*cuts))


@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (1024, 1024), (2**22,)])
def test_an_array_of_at_most_16_mib_is_one_chunk(shape: tuple[int, ...]) -> None:
    assert chunk_shape(spec(*shape)) == shape


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8192, 1024), (4096, 1024)),  # 32 MiB: two halves.
        ((2**23,), (2**22,)),
        # 322 MB of a prime factorisation 29 * 1733: 29 is the first even cut into 20 or
        # more. A row is 6400 bytes, so 16 rows are 25 pages: 1733 goes up to 109 * 16.
        ((50257, 1600), (109 * 16, 1600)),
        # One row alone is 64 MiB.
        ((3, 4096, 4096), (1, 1024, 4096)),
        # So are four, and one of the next dim: the cut is in the third.
        ((2, 2, 2048, 8192), (1, 1, 512, 8192)),
        # 1000 numbers are 4000 bytes, which 24 more make a page.
        ((1000,), (1024,)),
        # 1000 rows of a page each need nothing.
        ((1000, 1024), (1000, 1024)),
        # 900 numbers would need 124 more, which is over 1/32.
        ((900,), (900,)),
    ],
)
def test_the_first_dim_with_several_to_a_chunk_is_cut(shape, expected) -> None:
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
        # 1009 is prime. 1009 rows of 32 KiB are 31.5 MiB: as they are, rather than
        # 1009 files of a row each.
        ((2018, 8, 1024), 1009, (1009, 8, 1024)),
        # 1009 rows of 128 KiB are over four times the limit: 8 pieces, which do cross.
        ((2018, 32, 1024), 1009, (127, 32, 1024)),
        # Rows are never padded: the next ones follow.
        ((5000, 1), 1000, (1000, 1)),
    ],
)
def test_rows_per_chunk_bounds_the_leading_dim(shape, rows_per_chunk, expected) -> None:
    assert chunk_shape(spec(*shape), rows_per_chunk=rows_per_chunk) == expected


def test_a_dim_without_elements_has_chunks_of_one() -> None:
    assert chunk_shape(spec(0, 4)) == (1, 4)
    assert chunk_shape(spec(0, 4), rows_per_chunk=2) == (1, 4)


@dataclass(frozen=True)
class Cut:
    """One way to cut an array, with small limits that show the same as large ones."""

    shape: tuple[int, ...]
    itemsize: int
    rows_per_chunk: int | None
    max_bytes: int

    @property
    def chunk(self) -> tuple[int, ...]:
        return chunk_shape(
            spec(*self.shape, itemsize=self.itemsize),
            rows_per_chunk=self.rows_per_chunk,
            max_bytes=self.max_bytes,
        )

    @property
    def must_divide(self) -> bool:
        """Whether the rows are more than what one chunk could be anyway."""
        rows = self.rows_per_chunk
        return rows is not None and bool(self.shape) and rows < self.shape[0]


@pytest.fixture(params=SHAPES, ids=str)
def cuts(request: pytest.FixtureRequest) -> list[Cut]:
    limits = (1, 16, 1000, 4096, 40_000, 2**20)
    return [
        Cut(request.param, *how)
        for how in product((1, 2, 8), (None, 1, 2, 7, 1009), limits)
    ]


def test_any_chunk_is_one_run_of_memory(cuts: list[Cut]) -> None:
    """Ones, then a cut, then whole dims."""
    for cut in cuts:
        chunk, inner = cut.chunk, len(cut.shape)
        assert len(chunk) == inner
        while inner > 0 and chunk[inner - 1] == max(1, cut.shape[inner - 1]):
            inner -= 1
        assert all(size == 1 for size in chunk[: max(0, inner - 1)]), cut


def test_no_chunk_is_over_the_limit_but_for_the_reasons_given(cuts: list[Cut]) -> None:
    for cut in cuts:
        chunk = cut.chunk
        nbytes = prod(chunk) * cut.itemsize
        if cut.must_divide and chunk[0] == cut.rows_per_chunk > 1:
            assert nbytes <= MAX_EXCESS * cut.max_bytes, cut
            continue
        # A cut into nearly equal pieces may round up by one index of the dim that is
        # cut, and then by what fills the last page.
        sizes = [size for size in chunk if size > 1]
        index_bytes = nbytes // sizes[0] if sizes else cut.itemsize
        limit = max(cut.max_bytes, cut.itemsize) + (index_bytes if sizes else 0)
        assert nbytes <= limit * (1 + LARGEST_PADDING), cut


def test_chunks_are_padded_to_whole_pages_or_not_at_all(cuts: list[Cut]) -> None:
    for cut in cuts:
        chunk = cut.chunk
        for size, dim in zip(chunk, cut.shape, strict=True):
            is_paged = prod(chunk) * cut.itemsize % PAGE_BYTES == 0
            assert size <= max(1, dim) or is_paged, cut
            assert size <= max(1, dim) * (1 + LARGEST_PADDING), cut


def test_no_chunk_crosses_rows_that_are_not_too_many(cuts: list[Cut]) -> None:
    for cut in cuts:
        if cut.must_divide and cut.rows_per_chunk % cut.chunk[0]:
            inner = prod(max(1, dim) for dim in cut.shape[1:])
            rows_bytes = cut.rows_per_chunk * inner * cut.itemsize
            assert rows_bytes > MAX_EXCESS * cut.max_bytes, cut


@pytest.mark.parametrize("shape", [s for s in SHAPES if 0 not in s and prod(s) < 50000])
@pytest.mark.parametrize("rows_per_chunk", [None, 2, 7])
@pytest.mark.parametrize("max_bytes", [64, 4096, 40_000])
def test_chunks_in_order_are_the_memory_in_order(
    shape, rows_per_chunk, max_bytes
) -> None:
    chunk = chunk_shape(
        spec(*shape), rows_per_chunk=rows_per_chunk, max_bytes=max_bytes
    )
    value = np.arange(prod(shape)).reshape(shape)
    parts = [value[index].ravel() for index in grid(shape, chunk)]
    np.testing.assert_array_equal(np.concatenate(parts), value.ravel())


def test_the_limit_is_16_mib() -> None:
    assert MAX_CHUNK_BYTES == 16 * 2**20


@pytest.mark.parametrize("rows_per_chunk", [None, 7, 64])
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 1024),
        (12_565, 1600),
        (64, 64, 64),
        (5, 7),
        (96, 2**19),
        (1,),
        (12_569, 9),
    ],
)
def test_parts_of_an_array_are_on_one_grid_unless_chunks_would_be_tiny(
    shape: tuple[int, ...], rows_per_chunk: int | None
) -> None:
    part = spec(*shape)
    chunk = chunk_shape(part, rows_per_chunk=rows_per_chunk, cut_dims=[0])
    nbytes = prod(chunk) * part.itemsize
    assert nbytes <= MAX_EXCESS * MAX_CHUNK_BYTES
    if on_one_grid(part, chunk, [0]):
        assert shape[0] % chunk[0] == 0
        if rows_per_chunk is not None and chunk[0] > 1:
            assert rows_per_chunk % chunk[0] == 0 or chunk[0] >= shape[0]
    else:
        # Only where every common divisor gives files of less than 1 MiB.
        common = gcd(min(rows_per_chunk or shape[0], shape[0]), shape[0])
        row_bytes = prod(shape[1:]) * part.itemsize
        fitting = [d for d in range(1, common + 1) if common % d == 0]
        assert all(
            d * row_bytes < MIN_COMMON_BYTES or d * row_bytes > MAX_CHUNK_BYTES
            for d in fitting
        )


def test_without_other_parts_the_cut_is_as_ever() -> None:
    part = spec(12_565, 1600)
    assert chunk_shape(part) == chunk_shape(part, cut_dims=[1])
