"""Reads any part of one array of a checkpoint, and verifies the checksums."""

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from zinf.checkpoint.grid import Index, chunk_name
from zinf.checkpoint.manifest import StoredArray
from zinf.checkpoint.place import Place
from zinf.core.memory import aligned_empty
from zinf.core.memory.nvme.drive import Direction
from zinf.core.memory.nvme.file import as_bytes
from zinf.core.memory.nvme.open_file import Bytes, Each, Mover
from zinf.core.memory.nvme.request import Request, Task
from zinf.core.memory.nvme.system import O_NOFOLLOW
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.memory.zarr_format import METADATA, numpy_dtype, zarr_json
from zinf.core.program import ArrayId
from zinf.core.sharding import Box, intersection, relative
from zinf.core.text.json_text import from_json

MAX_METADATA_BYTES = 2**20
# Chunks that `damages` reads at once, enough to keep every thread of a drive busy.
NUM_AHEAD = 16

Read = Callable[[int, Bytes, Each | None], None]
"""Fills memory from an offset of a chunk file on; see `OpenFile.read`."""


@dataclass(frozen=True)
class Damage:
    """A file of a checkpoint that differs from what was saved.

    Attributes:
        index: the chunk of the array; None if the file is `zarr.json`.
        file: the path of the file.
        found: what is wrong, in a sentence.
    """

    array: ArrayId
    index: Index | None
    file: Place
    found: str


class Threads(Protocol):
    """What a `Drive` does for a source: runs tasks on threads."""

    def submit(
        self, direction: Direction, request: Request, tasks: Sequence[Task]
    ) -> None: ...


class ChunkSource(ABC):
    """An array of a checkpoint, read from its chunk files.

    Shape, dtype and chunks come from the manifest. `zarr.json` is not used here, but it
    is verified too, because other readers use it.

    Attributes:
        block_bytes: memory of a thread that reads a part of a chunk. The whole chunk
            passes through it, a few rows at a time; it has at least one row.
    """

    block_bytes = 2**20

    def __init__(
        self, array: ArrayId, stored: StoredArray, folder: Place, threads: Threads
    ) -> None:
        self.array, self.stored, self.folder = array, stored, folder
        self._threads = threads
        self._dtype = numpy_dtype(stored.grid.spec.dtype)
        self._is_described = False  # `zarr.json` is verified once.

    def read(self, box: Box, *, verify: bool) -> Future[np.ndarray]:
        """A part of the array, in aligned memory that is the caller's.

        The future raises StorageError if a file is missing, damaged or unreadable.
        """
        grid = self.stored.grid
        shape = tuple(high - low for low, high in box)
        value = aligned_empty(shape, self._dtype)
        tasks: list[Task] = []
        if verify and not self._is_described:
            tasks.append(self._check_metadata)
        for index in grid.meeting(box):
            part = intersection(grid.box(index), box)
            if part is not None:
                target = value[(*relative(part, box), ...)]
                tasks.append(partial(self._fill, index, part, target, verify))
        return self._start(f"Cannot read {self.array}", tasks, lambda: value)

    def damages(self) -> Iterator[Damage]:
        """Read the whole array, and yield every damaged file in order."""
        found = self._damage_of_metadata()
        if found is not None:
            yield Damage(self.array, None, self.folder / METADATA, found)
        under_way: deque[tuple[Index, Future]] = deque()
        for index in self.stored.grid.indices():
            if len(under_way) == NUM_AHEAD:
                yield from self._settled(*under_way.popleft())
            check = partial(self._check, index)
            under_way.append((index, self._start("Cannot verify", [check], None)))
        for index, future in under_way:
            yield from self._settled(index, future)

    def _start(self, what: str, tasks: list[Task], finish: object) -> Future:
        give = finish if callable(finish) else lambda: None
        request = Request(what, len(tasks), give)
        self._threads.submit("read", request, tasks)
        return request.future

    def _settled(self, index: Index, future: Future) -> Iterator[Damage]:
        try:
            future.result()
        except OSError as error:
            file = self.folder / chunk_name(index)
            yield Damage(self.array, index, file, str(error))

    def _fill(
        self, index: Index, part: Box, target: np.ndarray, verify: bool, mover: Mover
    ) -> None:
        """Read `part` of the array into `target`; the part lies in one chunk."""
        grid = self.stored.grid
        is_whole = target.nbytes == grid.chunk_bytes and target.flags.c_contiguous
        if is_whole:
            memory = as_bytes(target)
            with self._verified(index, memory.size, verify, mover) as read:
                read(0, memory)
            return
        corner = tuple((low, low + n) for (low, _), n in self._corner(index))
        inside = relative(part, corner)
        # Rows along the first dim in which the chunk has several indices.
        dim = next((d for d, n in enumerate(grid.chunk) if n > 1), len(grid.chunk) - 1)
        first, last = inside[dim].start, inside[dim].stop
        rows = target[(0,) * dim]
        read_rows = (0, grid.chunk[dim]) if verify else (first, last)
        for start, block in self._blocks(index, dim, read_rows, verify, mover):
            low, high = max(start, first), min(start + len(block), last)
            if low < high:
                place = (slice(low - start, high - start), *inside[dim + 1 :])
                np.copyto(rows[low - first : high - first], block[place])

    def _blocks(
        self,
        index: Index,
        dim: int,
        rows: tuple[int, int],
        verify: bool,
        mover: Mover,
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Rows of a chunk along `dim`, and the number of the first, block by block.

        All blocks are in the same memory, so that a chunk never is in memory as a
        whole. After the last one the chunk is verified.
        """
        chunk = self.stored.grid.chunk
        row = chunk[dim + 1 :]
        row_bytes = prod(row) * self._dtype.itemsize
        step = min(max(1, self.block_bytes // row_bytes), rows[1] - rows[0])
        memory = aligned_empty((step * row_bytes,), np.uint8)
        with self._verified(index, memory.size, verify, mover) as read:
            for start in range(*rows, step):
                length = min(step, rows[1] - start)
                content = memory[: length * row_bytes]
                read(start * row_bytes, content)
                yield start, content.view(self._dtype).reshape(length, *row)

    def _check(self, index: Index, mover: Mover) -> None:
        """Read a chunk for its checksum alone."""
        size = self.stored.grid.chunk_bytes
        memory = aligned_empty((min(self.block_bytes, size),), np.uint8)
        with self._verified(index, memory.size, True, mover) as read:
            for start in range(0, size, self.block_bytes):
                read(start, memory[: size - start])

    @contextmanager
    def _verified(
        self, index: Index, nbytes: int, verify: bool, mover: Mover
    ) -> Generator[Callable[[int, Bytes], None], None, None]:
        """A function that reads ranges of a chunk file.

        With `verify` the ranges must be the whole file, in order. Its checksum is
        compared after the `with` block.

        Args:
            nbytes: length of the ranges.
        """
        total = xxh3_64()
        with self._open(index, nbytes, mover) as read:
            yield lambda offset, memory: read(
                offset, memory, total.update if verify else None
            )
        if verify:
            self._compare(index, total.intdigest(), mover.what)

    def _corner(self, index: Index) -> Iterator[tuple[tuple[int, int], int]]:
        """For each dim: the range of a chunk, and its length with padding."""
        grid = self.stored.grid
        return zip(grid.box(index), grid.chunk, strict=True)

    @abstractmethod
    def _open(
        self, index: Index, nbytes: int, mover: Mover
    ) -> AbstractContextManager[Read]:
        """Open a chunk file of which ranges of `nbytes` will be read.

        Raises:
            StorageError: it is missing, no plain file, or has another size.
        """

    @abstractmethod
    def _read_metadata(self) -> bytes | None:
        """The content of `zarr.json`; None if it is a link or too large."""

    def _compare(self, index: Index, found: int, what: str) -> None:
        """Raise StorageError unless `found` is the checksum of a chunk."""
        expected = self.stored.checksums[self.stored.grid.number(index)]
        if found != expected:
            text = f"checksum {found:016x} instead of {expected:016x}"
            raise CHECKPOINT.error(
                what, errno.EIO, self.folder / chunk_name(index), text
            )

    def _check_metadata(self, mover: Mover) -> None:
        found = self._damage_of_metadata()
        if found is not None:
            raise CHECKPOINT.error(mover.what, errno.EIO, self.folder / METADATA, found)
        # Set only on success: a read that is tried again must fail again.
        self._is_described = True

    def _damage_of_metadata(self) -> str | None:
        try:
            content = self._read_metadata()
        except OSError as error:
            return os.strerror(error.errno or errno.EIO)
        if content is None:
            return "it is a link, or no file, or larger than any metadata"
        found = xxh3_64_intdigest(content)
        if found != self.stored.metadata:
            return f"checksum {found:016x} instead of {self.stored.metadata:016x}"
        if not self._is_described_by(content):
            return "it says other things of the array than the manifest"
        return None

    def _is_described_by(self, metadata: bytes) -> bool:
        """Whether `zarr.json`, which other readers use, describes the same array."""
        grid = self.stored.grid
        expected = from_json(zarr_json(grid.spec, grid.chunk))
        try:
            found = from_json(metadata)
            return {key: found[key] for key in expected} == expected
        except (ValueError, KeyError, TypeError, RecursionError):
            return False


class FileSource(ChunkSource):
    """An array of a checkpoint, read from files past the page cache."""

    folder: Path  # pyrefly: ignore[bad-override-mutable-attribute]

    @contextmanager
    def _open(
        self, index: Index, nbytes: int, mover: Mover
    ) -> Generator[Read, None, None]:
        path = self.folder / chunk_name(index)
        self._check_file(path, mover.what)
        with mover.open(path, os.O_RDONLY | O_NOFOLLOW, nbytes) as file:
            yield file.read

    def _read_metadata(self) -> bytes | None:
        path = self.folder / METADATA
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_METADATA_BYTES:
            return None
        return path.read_bytes()

    def _check_file(self, path: Path, what: str) -> None:
        """Raise StorageError unless `path` is a plain file of the size of a chunk.

        Checked first: opening a pipe would wait, and a large file would take memory.
        """
        try:
            status = os.lstat(path)
        except OSError as error:
            raise CHECKPOINT.failure(what, path, error) from error
        expected = self.stored.grid.chunk_bytes
        if not stat.S_ISREG(status.st_mode):
            raise CHECKPOINT.error(what, errno.EIO, path, "it is a link, or no file")
        if status.st_size != expected:
            found = f"it has {status.st_size:,} bytes instead of {expected:,}"
            raise CHECKPOINT.error(what, errno.EIO, path, found)
