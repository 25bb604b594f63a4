"""Reads a checkpoint from object storage."""

import errno
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from zinf.checkpoint.bucket.store import MissingObject, Store
from zinf.checkpoint.files import AbstractFiles
from zinf.checkpoint.grid import Index, chunk_name, folder_name
from zinf.checkpoint.manifest import FILE, Manifest, StoredArray, not_found
from zinf.checkpoint.parse import parse_manifest
from zinf.checkpoint.place import ObjectFolder
from zinf.checkpoint.source import ChunkSource, Read
from zinf.core.memory.nvme.drive import Direction
from zinf.core.memory.nvme.open_file import Bytes, Each, Mover
from zinf.core.memory.nvme.request import Request, Task
from zinf.core.memory.nvme.system import System
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.memory.zarr_format import METADATA
from zinf.core.program import ArrayId

NUM_READERS = 4
# A chunk is read in ranges of this size: each is a request, and is in memory twice.
PART_BYTES = 4 * 2**20


class ObjectFiles(AbstractFiles):
    def __init__(self, folder: ObjectFolder) -> None:
        self.folder, self.store = folder, Store(folder)

    def manifest(self) -> Manifest:
        try:
            return parse_manifest(self.store.get(FILE), self.folder)
        except MissingObject as error:
            raise not_found(self.folder) from error

    def check(self, arrays: Iterable[ArrayId]) -> None:
        """Does nothing: objects are never links, so none is elsewhere."""

    def source(self, array: ArrayId, stored: StoredArray) -> "ObjectSource":
        return ObjectSource(array, stored, self.store, self._readers)

    def staging_bytes(self, chunk_bytes: int) -> int:
        return NUM_READERS * min(PART_BYTES, chunk_bytes)

    def close(self) -> None:
        if "_readers" in vars(self):
            self._readers.close()
            del self._readers

    @cached_property
    def _readers(self) -> "Readers":
        return Readers()


class Readers:
    """Threads that wait for requests to object storage."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="zinf-bucket")

    def submit(
        self, direction: Direction, request: Request, tasks: Sequence[Task]
    ) -> None:
        for task in tasks:
            # A mover has the words of errors; it opens no file here.
            mover = Mover(System(), PART_BYTES, is_direct=False)
            self._pool.submit(request.run, task, mover)

    def close(self) -> None:
        self._pool.shutdown()


class ObjectSource(ChunkSource):
    """An array of a checkpoint, read from objects."""

    block_bytes = PART_BYTES

    def __init__(
        self, array: ArrayId, stored: StoredArray, store: Store, readers: Readers
    ) -> None:
        folder = store.folder / folder_name(array)
        super().__init__(array, stored, folder, readers)
        self._store = store

    @contextmanager
    def _open(
        self, index: Index, nbytes: int, mover: Mover
    ) -> Generator[Read, None, None]:
        name = f"{folder_name(self.array)}/{chunk_name(index)}"

        def read(offset: int, memory: Bytes, each: Each | None = None) -> None:
            for start in range(0, memory.size, PART_BYTES):
                wanted = memory[start : start + PART_BYTES]
                where = slice(offset + start, offset + start + wanted.size)
                part = self._store.get(name, where)
                if len(part) != wanted.size:
                    found = f"it has less than {self.stored.grid.chunk_bytes:,} bytes"
                    path = self.folder / chunk_name(index)
                    raise CHECKPOINT.error(mover.what, errno.EIO, path, found)
                wanted[...] = np.frombuffer(part, np.uint8)
                if each is not None:
                    each(wanted)

        yield read

    def _read_metadata(self) -> bytes:
        return self._store.get(f"{folder_name(self.array)}/{METADATA}")
