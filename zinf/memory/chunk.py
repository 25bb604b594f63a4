"""How an array on the NVMe tier is cut into chunk files."""

from math import ceil, prod

from zinf.program import ArraySpec

# Files of 4 to 16 MiB read and write fastest: one request each is enough for the drive,
# and an array still has several to work on at once. 64 MiB was slower.
MAX_CHUNK_BYTES = 16 * 2**20


def chunk_shape(
    spec: ArraySpec,
    *,
    rows_per_chunk: int | None = None,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> tuple[int, ...]:
    """The shape of the chunks, each of at most `max_bytes`, of an array of `spec`.

    The outermost dims are cut first, so that a chunk is one run of memory where it can
    be. With `rows_per_chunk`, no chunk crosses a multiple of that many rows: such rows
    can be read and written alone.

    Chunk files are of one size, so the last ones of a dim are padded where the chunk
    does not divide it. Even cuts are preferred; one chunk's worth of each dim is the
    most that can be wasted.
    """
    chunk = [max(1, dim) for dim in spec.shape]
    if rows_per_chunk is not None and chunk:
        assert rows_per_chunk > 0
        chunk[0] = min(rows_per_chunk, chunk[0])
    must_divide_rows = bool(chunk) and chunk[0] < spec.shape[0]
    for dim in range(len(chunk)):
        pieces = ceil(prod(chunk) * spec.itemsize / max_bytes)
        chunk[dim] = _cut(chunk[dim], pieces, evenly=dim == 0 and must_divide_rows)
    if chunk:
        # Only rows that have no even cut and little beside them are still too large.
        pieces = ceil(prod(chunk) * spec.itemsize / max_bytes)
        chunk[0] = _cut(chunk[0], pieces, evenly=False)
    return tuple(chunk)


def _cut(length: int, pieces: int, *, evenly: bool) -> int:
    """`length` in at least `pieces` pieces, equal ones if there are not many more."""
    pieces = min(pieces, length)
    for even_pieces in range(pieces, 2 * pieces + 1):
        if length % even_pieces == 0:
            return length // even_pieces
    return length if evenly else ceil(length / pieces)
