"""How an array on the NVMe tier is cut into chunk files."""

from collections.abc import Collection
from math import ceil, gcd, isqrt, prod

from zinf.core.memory.host.aligned import PAGE_BYTES
from zinf.core.program import ArraySpec

# Files of 4 to 16 MiB are fastest: one request a file is enough for the drive, and an
# array still has several files in flight. 64 MiB was slower.
MAX_CHUNK_BYTES = 16 * 2**20
# A chunk may be this many times larger, rather than cross rows that are used together.
MAX_EXCESS = 4
# Chunks of a share may be as small as this to lie on one grid with those of the others.
MIN_COMMON_BYTES = 2**20
# O_DIRECT moves whole pages. Rounding a chunk up to pages may pad it by this fraction.
LARGEST_PADDING = 1 / 32


def chunk_shape(
    spec: ArraySpec,
    *,
    rows_per_chunk: int | None = None,
    max_bytes: int = MAX_CHUNK_BYTES,
    cut_dims: Collection[int] = (),
) -> tuple[int, ...]:
    """The shape of the chunks of an array, each of about `max_bytes` at most.

    A chunk is one run of the array's memory: one index of each leading dim, a range of
    one dim, and all of the dims after it. With `rows_per_chunk`, no chunk crosses a
    multiple of that many rows, so that a group of that many rows can be read and
    written alone. For that a chunk may have `MAX_EXCESS` times `max_bytes`. Only if a
    group is larger still and cannot be cut evenly, chunks cross its end.

    Chunk files of an array have one size, so the last ones along a dim are padded if
    the chunk does not divide the dim. Even cuts are preferred, then multiples of a
    page.

    Args:
        cut_dims: dims along which `spec` is one of several equal shares of an array.
            Chunks divide the share evenly along them, so that the chunks of all shares
            lie on one grid, unless they would be smaller than `MIN_COMMON_BYTES`;
            `on_one_grid` tells.
    """
    dims = [max(1, dim) for dim in spec.shape]
    if not dims:
        return ()
    # Cut the first dim of which one index fits in a chunk, or the last dim.
    cut = 0
    while cut < len(dims) - 1 and _inner_bytes(dims, cut, spec.itemsize) > max_bytes:
        cut += 1
    inner_bytes = _inner_bytes(dims, cut, spec.itemsize)
    length, must_divide = dims[cut], False
    if cut == 0 and rows_per_chunk is not None:
        assert rows_per_chunk > 0
        length = min(rows_per_chunk, length)
        must_divide = length < dims[0]
    pieces = ceil(length * inner_bytes / max_bytes)
    if cut in cut_dims:
        common = gcd(length, dims[cut])
        fitting = _largest_divisor(common, max_bytes // inner_bytes)
        if fitting * inner_bytes >= min(MIN_COMMON_BYTES, length * inner_bytes):
            return (*[1] * cut, fitting, *dims[cut + 1 :])
    even = _even_cut(length, pieces)
    if even is not None:
        length = even
    elif not must_divide or pieces > MAX_EXCESS:
        length = min(ceil(length / pieces), max(1, max_bytes // inner_bytes))
    if not must_divide:
        length = _whole_pages(length, inner_bytes)
    return (*[1] * cut, length, *dims[cut + 1 :])


def on_one_grid(
    spec: ArraySpec, chunk: tuple[int, ...], cut_dims: Collection[int]
) -> bool:
    """Whether chunks divide `spec` evenly along all of `cut_dims`."""
    return all(spec.shape[dim] % chunk[dim] == 0 for dim in cut_dims)


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is not above `limit`, which may be 0."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    divisors = [*small, *(number // d for d in small)]
    return max((d for d in divisors if d <= limit), default=1)


def _inner_bytes(dims: list[int], dim: int, itemsize: int) -> int:
    """Bytes of one index of `dim`."""
    return prod(dims[dim + 1 :]) * itemsize


def _even_cut(length: int, pieces: int) -> int | None:
    """The length of a piece in an even cut into `pieces` to `2 * pieces`, or None."""
    pieces = min(pieces, length)
    for even_pieces in range(pieces, 2 * pieces + 1):
        if length % even_pieces == 0:
            return length // even_pieces
    return None


def _whole_pages(length: int, inner_bytes: int) -> int:
    """`length`, or a little more where that makes the chunk a multiple of a page."""
    step = PAGE_BYTES // gcd(inner_bytes, PAGE_BYTES)
    rounded = -(-length // step) * step
    return rounded if rounded <= length * (1 + LARGEST_PADDING) else length
