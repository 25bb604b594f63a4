"""One array in files: a zarr v3 array whose chunks are moved without TensorStore."""

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, prod
from pathlib import Path
from threading import Lock

import tensorstore as ts

from zinf.core.memory.chunk import chunk_shape
from zinf.core.memory.nvme.chunk_file import ChunkFile
from zinf.core.memory.nvme.intervals import Intervals
from zinf.core.memory.nvme.open_file import Bytes, Mover
from zinf.core.memory.nvme.request import Task
from zinf.core.memory.storage_error import storage_error
from zinf.core.memory.zarr_format import numpy_dtype, zarr_spec
from zinf.core.program import ArraySpec

Rows = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """The spec of an array, and the shape of its chunks.

    An array can reuse the files of another array with an equal layout.
    """

    spec: ArraySpec
    chunk: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        return prod(self.chunk) * self.spec.itemsize

    def runs(self) -> Iterator[tuple[str, int, int]]:
        """`(file name, first byte, number of bytes)` of each chunk, in order of memory.

        A chunk is one run of the array's memory, and a prefix of its file.
        """
        shape, chunk = self.spec.shape, self.chunk
        if 0 in shape:
            return
        cut = next((d for d, size in enumerate(chunk) if size > 1), len(chunk) - 1)
        inner_bytes = prod(shape[cut + 1 :]) * self.spec.itemsize
        start = 0
        counts = [ceil(s / c) for s, c in zip(shape, chunk, strict=True)]
        for index in product(*map(range, counts)):
            length = 1
            if shape:
                length = min(chunk[cut], shape[cut] - index[cut] * chunk[cut])
            name = ".".join(["c", *map(str, index)])
            yield name, start, length * inner_bytes
            start += length * inner_bytes


def layout_of(
    spec: ArraySpec,
    rows_per_chunk: int | None = None,
    cut_dims: Collection[int] = (),
) -> Layout:
    chunk = chunk_shape(spec, rows_per_chunk=rows_per_chunk, cut_dims=cut_dims)
    return Layout(spec, chunk)


class NvmeArray:
    """An array in files, which can be read and written whole or by rows.

    A chunk file has the uncompressed, little-endian bytes of the chunk, then padding up
    to the size that all chunks have. Rows that were never written cannot be read.

    Args:
        folder: has the metadata; zarr readers open it.
        chunks: the files of `layout`, in the order of its runs.

    Attributes:
        pending: reads and writes in flight.
    """

    def __init__(
        self, folder: Path, layout: Layout, chunks: Sequence[ChunkFile]
    ) -> None:
        self.folder = folder
        self.layout = layout
        self.spec = layout.spec
        self.chunks = chunks
        self.dtype = numpy_dtype(self.spec.dtype)
        self.pending: set[Future] = set()
        self._num_rows = self.spec.shape[0] if self.spec.shape else 1
        self._row_bytes = self.spec.nbytes // max(1, self._num_rows)
        self._starts = [chunk.start for chunk in chunks]
        self._written = Intervals()
        self._lock = Lock()

    def shape_of(self, rows: Rows | None) -> tuple[int, ...]:
        if rows is None:
            return self.spec.shape
        return (rows[1] - rows[0], *self.spec.shape[1:])

    def is_written(self, rows: Rows | None) -> bool:
        """Whether all of `rows` have content: they were written, without failure."""
        with self._lock:
            return self._written.covers(*(rows or (0, self._num_rows)))

    def check_written(self, rows: Rows | None, what: str) -> None:
        """Raise StorageError, which begins with `what`, unless `rows` have content."""
        if not self.is_written(rows):
            found = "it was never (or not wholly) written, or its last write failed"
            raise storage_error(what, errno.ENODATA, self.folder, found)

    def mark_written(self, rows: Rows | None, *, is_written: bool = True) -> None:
        with self._lock:
            change = self._written.add if is_written else self._written.remove
            change(*(rows or (0, self._num_rows)))

    def forget(self) -> None:
        """Mark the content as never written, for another array to use the files."""
        self.mark_written(None, is_written=False)
        for chunk in self.chunks:
            chunk.forget()

    def reads(self, rows: Rows | None, memory: Bytes) -> list[tuple[ChunkFile, Task]]:
        """Tasks that together fill `memory` with `rows`, and the chunk of each."""
        return self._tasks(rows, memory, ChunkFile.read)

    def writes(self, rows: Rows | None, memory: Bytes) -> list[tuple[ChunkFile, Task]]:
        """Tasks that together replace `rows` with the content of `memory`."""
        return self._tasks(rows, memory, ChunkFile.write)

    def chunks_of(self, rows: Rows | None) -> Iterator[tuple[str, ChunkFile]]:
        """The name and the file of each chunk that holds some of `rows`."""
        begin, end = 0, self.spec.nbytes
        if rows is not None:
            begin, end = (row * self._row_bytes for row in rows)
        for (name, start, nbytes), chunk in zip(
            self.layout.runs(), self.chunks, strict=True
        ):
            if start < end and begin < start + nbytes:
                yield name, chunk

    def _tasks(
        self,
        rows: Rows | None,
        memory: Bytes,
        verb: Callable[[ChunkFile, int, int, Bytes, Mover], None],
    ) -> list[tuple[ChunkFile, Task]]:
        begin = 0 if rows is None else rows[0] * self._row_bytes
        end = begin + memory.size
        tasks: list[tuple[ChunkFile, Task]] = []
        first = max(0, bisect_right(self._starts, begin) - 1)
        for chunk in self.chunks[first:]:
            if chunk.start >= end:
                break
            low = max(begin, chunk.start)
            high = min(end, chunk.start + chunk.nbytes)
            if low < high:
                part = memory[low - begin : high - begin]
                inner = low - chunk.start, high - chunk.start
                tasks.append((chunk, partial(verb, chunk, *inner, part)))
        return tasks


def write_metadata(
    folder: Path, layout: Layout, context: ts.Context, *, timeout_seconds: float
) -> None:
    """Make `folder` with the metadata of a zarr array, readable by this user only.

    Raises:
        ValueError: TensorStore cannot use the dtype or the folder.
        OSError: the folder cannot be made, or the drive does not answer in time.
    """
    folder.mkdir(mode=0o700)
    spec = zarr_spec(folder, layout.spec, layout.chunk)
    ts.open(spec, context=context, create=True, open=False).result(timeout_seconds)
    os.chmod(folder / "zarr.json", 0o600)
