"""Reads any part of one array of a checkpoint, and verifies the checksums."""

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from zinf.checkpoint.failure import explain, failure
from zinf.checkpoint.grid import Index, chunk_name
from zinf.checkpoint.manifest import StoredArray
from zinf.checkpoint.place import Place
from zinf.json_text import from_json
from zinf.memory import aligned_empty
from zinf.memory.nvme.drive import Direction
from zinf.memory.nvme.file import as_bytes
from zinf.memory.nvme.open_file import Bytes, Mover
from zinf.memory.nvme.request import Request, Task
from zinf.memory.nvme.system import O_NOFOLLOW
from zinf.memory.zarr_format import METADATA, numpy_dtype, zarr_json
from zinf.program import ArrayId
from zinf.sharding import Box, intersection, relative

MAX_METADATA_BYTES = 2**20
# Chunks that `damages` reads at once, enough to keep every thread of a drive busy.
NUM_AHEAD = 16


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
    """

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
            check = partial(self._read_chunk, index, None, True)
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
            self._read_chunk(index, as_bytes(target), verify, mover)
            return
        content = self._read_chunk(index, None, verify, mover)
        chunk = content.view(self._dtype).reshape(grid.chunk)
        corner = tuple((low, low + n) for (low, _), n in self._corner(index))
        np.copyto(target, chunk[(*relative(part, corner), ...)])

    def _corner(self, index: Index) -> Iterator[tuple[tuple[int, int], int]]:
        """For each dim: the range of a chunk, and its length with padding."""
        grid = self.stored.grid
        return zip(grid.box(index), grid.chunk, strict=True)

    @abstractmethod
    def _read_chunk(
        self, index: Index, memory: Bytes | None, verify: bool, mover: Mover
    ) -> Bytes:
        """The content of a chunk file, read into `memory` if it is given."""

    @abstractmethod
    def _read_metadata(self) -> bytes | None:
        """The content of `zarr.json`; None if it is a link or too large."""

    def _compare(self, index: Index, found: int, what: str) -> None:
        """Raise StorageError unless `found` is the checksum of a chunk."""
        expected = self.stored.checksums[self.stored.grid.number(index)]
        if found != expected:
            text = f"checksum {found:016x} instead of {expected:016x}"
            raise explain(what, errno.EIO, self.folder / chunk_name(index), text)

    def _check_metadata(self, mover: Mover) -> None:
        found = self._damage_of_metadata()
        if found is not None:
            raise explain(mover.what, errno.EIO, self.folder / METADATA, found)
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

    def _read_chunk(
        self, index: Index, memory: Bytes | None, verify: bool, mover: Mover
    ) -> Bytes:
        grid, path = self.stored.grid, self.folder / chunk_name(index)
        self._check_file(path, mover.what)
        if memory is None:
            memory = aligned_empty((grid.chunk_bytes,), np.uint8)
        with mover.open(path, os.O_RDONLY | O_NOFOLLOW, memory.size) as file:
            if not verify:
                file.read(0, memory)
                return memory
            total = xxh3_64()
            file.read(0, memory, total.update)
        self._compare(index, total.intdigest(), mover.what)
        return memory

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
            raise failure(what, path, error) from error
        expected = self.stored.grid.chunk_bytes
        if not stat.S_ISREG(status.st_mode):
            raise explain(what, errno.EIO, path, "it is a link, or no file")
        if status.st_size != expected:
            found = f"it has {status.st_size:,} bytes instead of {expected:,}"
            raise explain(what, errno.EIO, path, found)
