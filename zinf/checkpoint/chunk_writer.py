"""Writes the files of a checkpoint and syncs them to the drive."""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from xxhash import xxh3_64

from zinf.checkpoint.grid import Grid, Index, chunk_name, folder_name
from zinf.checkpoint.snapshot import Linked
from zinf.core.memory import StorageError, aligned_empty
from zinf.core.memory.nvme import Drive
from zinf.core.memory.nvme.file import as_bytes
from zinf.core.memory.nvme.open_file import STAGING_BYTES, Bytes, Mover
from zinf.core.memory.nvme.request import Request
from zinf.core.memory.nvme.system import sync_folder
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.memory.zarr_format import METADATA, zarr_json
from zinf.core.program import ArrayId

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)
Result = TypeVar("Result")
NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Written(Protocol):
    """Waits until a file is safe, and gives its checksum."""

    def result(self) -> int: ...


class RowsWritten(Protocol):
    """Waits until rows of a chunk are written; the last ones give the checksum."""

    def result(self) -> int | None: ...


class AbstractWriter(ABC):
    """Writes the zarr arrays of a checkpoint, chunk by chunk."""

    @abstractmethod
    def describe(self, array: ArrayId, grid: Grid) -> Written:
        """Begin to write `zarr.json` of an array."""

    @abstractmethod
    def write(
        self, array: ArrayId, grid: Grid, index: Index, content: np.ndarray
    ) -> RowsWritten:
        """Begin to write a chunk.

        Args:
            content: the chunk without padding, or the next rows of it if the writer
                takes parts. It must not change before it is written.
        """

    @abstractmethod
    def adopt(self, linked: Linked) -> Written:
        """Begin to take the content of a linked file of the NVMe tier."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until all that was written survives a power cut."""

    @abstractmethod
    def close(self) -> None: ...


class ChunkWriter(AbstractWriter):
    """Writes zarr arrays in a folder, chunk by chunk, on the threads of a drive.

    When the future of a file is done, the content of the file is synced to the drive.
    The folder entry of the file survives a power cut only after `sync`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._drive = Drive(directory)
        self._folders: set[Path] = set()
        self._growing: dict[Path, GrowingChunk] = {}

    def close(self) -> None:
        self._drive.close()

    def describe(self, array: ArrayId, grid: Grid) -> Future[int]:
        """Write `zarr.json` of an array; the future has the checksum of that file."""
        content = zarr_json(grid.spec, grid.chunk)
        path = self._folder(array) / METADATA
        write = partial(_write, path, np.frombuffer(content, np.uint8))
        return self._start(f"Cannot save {array}", write)

    def write(
        self, array: ArrayId, grid: Grid, index: Index, content: np.ndarray
    ) -> RowsWritten:
        """Write the file of a chunk; the future has the checksum of that file.

        Rows of a chunk that come in several parts must come in order.

        Args:
            content: the chunk without padding, or the next rows of it. It must not
                change before the future is done.
        """
        what, path = f"Cannot save {array}", self._folder(array) / chunk_name(index)
        shape = tuple(high - low for low, high in grid.box(index))
        if content.shape == shape:

            def write(mover: Mover) -> int:
                return _write(path, padded(content, grid.chunk), mover)

            return self._start(what, write)
        growing = self._growing.get(path)
        if growing is None:
            self._start(what, partial(_make, path, grid.chunk_bytes)).result()
            start = partial(self._start, what)
            growing = self._growing[path] = GrowingChunk(path, grid, shape[0], start)
        written = growing.write(content)
        if growing.is_complete:
            del self._growing[path]
        return written

    def adopt(self, linked: Linked) -> Future[int]:
        """Move or copy a linked file to its array; the future has its checksum."""
        array = linked.share.array
        path = self._folder(array) / chunk_name(linked.index)
        if linked.drive is None:
            linked.chunk.move_to(path)
            take = partial(_keep, linked)
        else:
            take = partial(_copy, linked, path)
        return self._start(f"Cannot save {array}", take)

    def sync(self) -> None:
        """Sync all folders, so that every file written so far survives a power cut."""
        by_depth: dict[int, list[Path]] = {}
        for folder in self._folders | {self.directory}:
            by_depth.setdefault(len(folder.parts), []).append(folder)
        # Deepest first: the entry of a folder is in the folder above it.
        for _, folders in sorted(by_depth.items(), reverse=True):
            tasks = [partial(_sync_folder, folder) for folder in folders]
            request = Request("Cannot save a checkpoint", len(tasks), lambda: None)
            self._drive.submit("write", request, tasks)
            request.future.result()

    def _folder(self, array: ArrayId) -> Path:
        """The folder of an array; made if it is missing, and registered for `sync`."""
        made = folder = self.directory / folder_name(array)
        if made in self._folders:
            return made
        os.makedirs(made, exist_ok=True)
        while folder != self.directory:
            self._folders.add(folder)
            folder = folder.parent
        return made

    def _start(self, what: str, task: Callable[[Mover], Result]) -> Future[Result]:
        found: list[Result] = []

        def run(mover: Mover) -> None:
            try:
                found.append(task(mover))
            except StorageError as error:
                if error.errno in UNWRITABLE:
                    # The advice for the NVMe tier does not apply to a checkpoint.
                    raise CHECKPOINT.failure(what, self.directory, error) from error
                raise

        request = Request(what, 1, found.pop)
        self._drive.submit("write", request, [run])
        return request.future


class GrowingChunk:
    """A chunk file that gets its rows in several parts, in order.

    Args:
        path: the file, which has its size already.
        num_rows: rows of the chunk, without padding.
        start: begins a task on a thread of the drive.
    """

    def __init__(
        self,
        path: Path,
        grid: Grid,
        num_rows: int,
        start: Callable[[Callable[[Mover], None]], Future[None]],
    ) -> None:
        self._path, self._grid, self._start = path, grid, start
        self._rows_left = num_rows
        self._size = 0
        self._total = xxh3_64()
        self._parts: list[Future[None]] = []

    @property
    def is_complete(self) -> bool:
        return not self._rows_left

    def write(self, content: np.ndarray) -> RowsWritten:
        """Begin to write the next rows."""
        # Summed here and not in a thread of the drive: the order of rows matters.
        memory = padded(content, (len(content), *self._grid.chunk[1:]))
        self._total.update(memory)  # pyrefly: ignore
        part = self._start(partial(_write_part, self._path, self._size, memory))
        self._parts.append(part)
        self._size += memory.size
        self._rows_left -= len(content)
        return LastRows(self) if self.is_complete else part

    def complete(self) -> int:
        """Wait for all parts and sync the file; returns its checksum."""
        for part in self._parts:
            part.result()
        self._start(partial(_sync, self._path)).result()
        # The end of the file is padding, which is zero.
        end = self._grid.chunk_bytes
        for start in range(self._size, end, STAGING_BYTES):
            self._total.update(bytes(min(STAGING_BYTES, end - start)))
        return self._total.intdigest()


@dataclass(frozen=True)
class LastRows:
    """The last rows of a chunk; they are written when all are."""

    chunk: GrowingChunk

    def result(self) -> int:
        return self.chunk.complete()


def _make(path: Path, nbytes: int, mover: Mover) -> None:
    with mover.open(path, NEW_FILE) as file:
        file.allocate(nbytes)


def _write_part(path: Path, offset: int, memory: Bytes, mover: Mover) -> None:
    with mover.open(path, os.O_RDWR, memory.size) as file:
        file.write(offset, memory)


def _sync(path: Path, mover: Mover) -> None:
    with mover.open(path, os.O_RDWR) as file:
        file.sync()


def _sync_folder(folder: Path, mover: Mover) -> None:
    mover.call(sync_folder, folder)


def _write(path: Path, memory: Bytes, mover: Mover) -> int:
    total = xxh3_64()
    with mover.open(path, NEW_FILE, memory.size) as file:
        file.allocate(memory.size)
        file.write(0, memory, total.update)
        file.sync()
    return total.intdigest()


def _keep(linked: Linked, mover: Mover) -> int:
    """Sync a moved chunk file; read the file only if its full checksum is unknown."""
    chunk = linked.chunk
    known = chunk.full_checksum
    if known is not None:
        with mover.open(chunk.path, os.O_RDONLY) as file:
            file.sync()
        return known
    total = xxh3_64()
    chunk.check(total.update, mover, durable=True)
    return total.intdigest()


def _copy(linked: Linked, path: Path, mover: Mover) -> int:
    """Copy a chunk file from the file system of the NVMe tier, and sync the copy."""
    assert linked.drive is not None
    chunk, total = linked.chunk, xxh3_64()
    with mover.open(path, NEW_FILE, chunk.file_bytes) as file:
        file.allocate(chunk.file_bytes)
        position = 0

        def write(part: Bytes) -> None:
            nonlocal position
            total.update(part)  # pyrefly: ignore
            file.write(position, part)
            position += part.size

        chunk.check(write, linked.drive.mover(), durable=False)
        file.sync()
    return total.intdigest()


def padded(content: np.ndarray, shape: tuple[int, ...]) -> Bytes:
    """The bytes of a chunk, or of rows of it: `content`, padded with zeros."""
    if content.shape == shape:
        return as_bytes(np.ascontiguousarray(content))
    whole = aligned_empty(shape, content.dtype)
    whole[...] = np.zeros((), content.dtype)
    whole[tuple(slice(size) for size in content.shape)] = content
    return as_bytes(whole)
