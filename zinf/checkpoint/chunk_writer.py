"""Writes the files of a checkpoint and syncs them to the drive."""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from xxhash import xxh3_64

from zinf.checkpoint.failure import failure
from zinf.checkpoint.grid import Grid, Index, chunk_name, folder_name
from zinf.checkpoint.snapshot import Linked
from zinf.memory import StorageError, aligned_empty
from zinf.memory.nvme import Drive
from zinf.memory.nvme.file import as_bytes
from zinf.memory.nvme.open_file import Bytes, Mover
from zinf.memory.nvme.request import Request
from zinf.memory.nvme.system import sync_folder
from zinf.memory.zarr_format import METADATA, zarr_json
from zinf.program import ArrayId

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)
NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Written(Protocol):
    """Waits until a file is safe, and gives its checksum."""

    def result(self) -> int: ...


class AbstractWriter(ABC):
    """Writes the zarr arrays of a checkpoint, chunk by chunk."""

    @abstractmethod
    def describe(self, array: ArrayId, grid: Grid) -> Written:
        """Begin to write `zarr.json` of an array."""

    @abstractmethod
    def write(
        self, array: ArrayId, grid: Grid, index: Index, content: np.ndarray
    ) -> Written:
        """Begin to write a chunk.

        Args:
            content: the chunk without padding. It must not change before the file is
                written.
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
    ) -> Future[int]:
        """Write the file of a chunk; the future has the checksum of that file.

        Args:
            content: the chunk without padding. It must not change before the future is
                done.
        """
        path = self._folder(array) / chunk_name(index)

        def write(mover: Mover) -> int:
            return _write(path, padded(content, grid), mover)

        return self._start(f"Cannot save {array}", write)

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

    def _start(self, what: str, task: Callable[[Mover], int]) -> Future[int]:
        found: list[int] = []

        def run(mover: Mover) -> None:
            try:
                found.append(task(mover))
            except StorageError as error:
                if error.errno in UNWRITABLE:
                    # The advice for the NVMe tier does not apply to a checkpoint.
                    raise failure(what, self.directory, error) from error
                raise

        request = Request(what, 1, found.pop)
        self._drive.submit("write", request, [run])
        return request.future


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


def padded(content: np.ndarray, grid: Grid) -> Bytes:
    """The bytes of a chunk file: `content`, padded with zeros to a whole chunk."""
    if content.nbytes == grid.chunk_bytes:
        return as_bytes(np.ascontiguousarray(content))
    whole = aligned_empty(grid.chunk, content.dtype)
    whole[...] = np.zeros((), content.dtype)
    whole[tuple(slice(size) for size in content.shape)] = content
    return as_bytes(whole)
