"""The files of a saved checkpoint, for reading: on a drive, or in object storage."""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from zinf.checkpoint.grid import folder_name
from zinf.checkpoint.manifest import FILE, Manifest, StoredArray
from zinf.checkpoint.parse import read_manifest
from zinf.checkpoint.source import ChunkSource, FileSource
from zinf.core.memory.nvme import Drive
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.program import ArrayId


class AbstractFiles(ABC):
    """The files of a checkpoint as `Saved` reads them.

    The first read starts threads.
    """

    @abstractmethod
    def manifest(self) -> Manifest:
        """The manifest, checked; for the errors see `Saved`."""

    @abstractmethod
    def check(self, arrays: Iterable[ArrayId]) -> None:
        """Raise StorageError if files of these arrays are elsewhere."""

    @abstractmethod
    def source(self, array: ArrayId, stored: StoredArray) -> ChunkSource: ...

    @abstractmethod
    def staging_bytes(self, chunk_bytes: int) -> int:
        """Host bytes that reads of chunks take beside their results."""

    @abstractmethod
    def close(self) -> None: ...


class LocalFiles(AbstractFiles):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def manifest(self) -> Manifest:
        return read_manifest(self.directory)

    def check(self, arrays: Iterable[ArrayId]) -> None:
        top = os.path.realpath(self.directory)
        for array in arrays:
            name = folder_name(array)
            folder = self.directory / name
            if os.path.realpath(folder) != os.path.join(top, name):
                found = f"the folder of {array} is, or is in, a link to elsewhere"
                raise CHECKPOINT.error(
                    "Cannot use the checkpoint", errno.EIO, folder, found
                )

    def source(self, array: ArrayId, stored: StoredArray) -> ChunkSource:
        folder = self.directory / folder_name(array)
        return FileSource(array, stored, folder, self._drive)

    def staging_bytes(self, chunk_bytes: int) -> int:
        return 0

    def close(self) -> None:
        if "_drive" in vars(self):
            self._drive.close()
            del self._drive

    @cached_property
    def _drive(self) -> Drive:
        return Drive(self.directory, probe=self.directory / FILE)
