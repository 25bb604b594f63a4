"""Writes the files of a checkpoint, each for good before it is counted as written."""

import os
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from zinf.checkpoint.grid import Grid, Index, chunk_name, folder_name
from zinf.checkpoint.manifest import sync_folder
from zinf.memory import aligned_empty
from zinf.memory.nvme import Drive
from zinf.memory.nvme.file import as_bytes
from zinf.memory.nvme.open_file import Bytes, Mover
from zinf.memory.nvme.request import Request
from zinf.memory.zarr_format import zarr_json
from zinf.program import ArrayId

METADATA = "zarr.json"
NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL


class ChunkWriter:
    """Makes zarr arrays in a folder, chunk by chunk, from several threads of a drive.

    A file's content is on the drive, safe from a power cut, when its future is done;
    that it is there at all, after `sync`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._drive = Drive(directory)
        self._folders: set[Path] = set()

    def close(self) -> None:
        self._drive.close()

    def begin(self, array: ArrayId, grid: Grid) -> int:
        """Make the folder and the metadata of an array; returns the checksum of that.

        Raises:
            StorageError: they cannot be made.
        """
        folder = self.directory / folder_name(array)
        folder.mkdir(parents=True, exist_ok=True)
        content = zarr_json(grid.spec, grid.chunk)
        memory = np.frombuffer(content, np.uint8)
        what = f"Cannot save {array}"
        self._drive.run(what, partial(_write, folder / METADATA, memory))
        while folder != self.directory:
            self._folders.add(folder)
            folder = folder.parent
        return xxh3_64_intdigest(content)

    def write(
        self, array: ArrayId, grid: Grid, index: Index, content: np.ndarray
    ) -> Future[int]:
        """Write the file of a chunk; the future has its checksum.

        Args:
            content: the chunk without padding, not to be changed until it is done.
        """
        path = self.directory / folder_name(array) / chunk_name(index)
        checksums: list[int] = []

        def write(mover: Mover) -> None:
            memory = _padded(content, grid)
            checksums.append(_write(path, memory, mover))

        request = Request(f"Cannot save {array}", 1, partial(checksums.pop))
        self._drive.submit("write", request, [write])
        return request.future

    def sync(self) -> None:
        """Make everything that was written survive a power cut."""
        # From the deepest up: a folder is found only through the one that it is in.
        for folder in sorted(self._folders, key=lambda p: -len(p.parts)):
            sync_folder(folder)
        sync_folder(self.directory)


def _write(path: Path, memory: Bytes, mover: Mover) -> int:
    total = xxh3_64()
    with mover.open(path, NEW_FILE, memory.size) as file:
        file.allocate(memory.size)
        file.write(0, memory, total.update)
        file.sync()
    return total.intdigest()


def _padded(content: np.ndarray, grid: Grid) -> Bytes:
    """The bytes of a chunk file: all are of one size."""
    if content.nbytes == grid.chunk_bytes:
        return as_bytes(np.ascontiguousarray(content))
    whole = aligned_empty(grid.chunk, content.dtype)
    whole[...] = np.zeros((), content.dtype)
    whole[tuple(slice(size) for size in content.shape)] = content
    return as_bytes(whole)
