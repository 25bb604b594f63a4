"""Where a save goes: small files by name, and what its place allows.

Chunk files have writers of their own (`chunk_writer`, `bucket.save`).
"""

import errno
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from zinf.checkpoint.grid import folder_name
from zinf.checkpoint.place import ObjectFolder
from zinf.core.memory.nvme.system import sync, sync_folder
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.program import ArrayId

# At most so many bytes of a path are Orbax's temporary names and the name of a chunk.
PATH_REST = 128

Folder = TypeVar("Folder", Path, ObjectFolder)


class Written(Protocol):
    """A write of a file that has begun; `result` waits for it."""

    def result(self) -> None:
        """Wait until the file is safe; raise StorageError if it was not written."""


class Done:
    """A `Written` whose file is on the drive already."""

    def result(self) -> None: ...


class AbstractStorage(ABC, Generic[Folder]):
    """The files below a folder, by names with slashes.

    Every method raises StorageError, with advice, if it cannot do what it says.
    """

    folder: Folder

    @abstractmethod
    def put(self, name: str, content: bytes) -> Written:
        """Begin to write a file; all of it appears at once, or nothing."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """The content of a file. FileNotFoundError if there is none."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None: ...

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there is nothing below the folder, which is made if need be."""

    @abstractmethod
    def clear(self) -> None:
        """Delete everything below the folder, as far as that can be done.

        The files that stay are of a save without a manifest, so they are not taken for
        a checkpoint.
        """

    def check_space(self, nbytes: int) -> None:
        """Raise StorageError unless there is room for so many bytes."""

    def check_names(self, below: str, arrays: Iterable[ArrayId]) -> None:
        """Raise StorageError if a name of an array's file below a folder is too long.

        Args:
            below: the name of the folder, which need not exist.
        """

    def claim(self) -> None:
        """Make the folder of a checkpoint, or use an empty one.

        Raises:
            FileExistsError: it is not empty.
        """
        if not self.is_empty():
            raise FileExistsError(
                f"{self.folder} is not empty, and a checkpoint is never overwritten. "
                "Name another folder, such as one for each step, which "
                "zinf.checkpoint.Checkpoints does by itself, or delete that one first."
            )


class FolderStorage(AbstractStorage[Path]):
    """Files of a file system. Each is synced before it gets its name, and after."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, content: bytes) -> Done:
        fresh = self.folder / f"{name}.new"
        with CHECKPOINT.explained(f"Cannot save {name}", self.folder):
            with open(fresh, "wb") as file:
                file.write(content)
                file.flush()
                sync(file.fileno())
            os.replace(fresh, self.folder / name)
            sync_folder(self.folder)
        return Done()

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink()

    def is_empty(self) -> bool:
        with CHECKPOINT.explained(
            "Cannot make the folder of a checkpoint", self.folder
        ):
            self.folder.mkdir(parents=True, exist_ok=True)
            return not any(self.folder.iterdir())

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def check_space(self, nbytes: int) -> None:
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < nbytes:
            found = (
                f"it takes {nbytes:,} bytes and {free_bytes:,} are free: "
                f"{nbytes - free_bytes:,} too few"
            )
            raise self._error("Cannot save a checkpoint", errno.ENOSPC, found)

    def check_names(self, below: str, arrays: Iterable[ArrayId]) -> None:
        longest_name, longest_path = self._longest_names()
        for array in arrays:
            folder = folder_name(array)
            name = max(map(len, folder.split("/")))
            path = len(os.fsencode(self.folder / below)) + len(folder) + PATH_REST
            found = None
            if name > longest_name:
                found = f"a name of {name:,} bytes, and {longest_name:,} are allowed"
            elif path > longest_path:
                found = f"a path of {path:,} bytes, and {longest_path:,} are allowed"
            if found is not None:
                found = f"its folder would have {found}"
                raise self._error(f"Cannot save {array}", errno.ENAMETOOLONG, found)

    def _longest_names(self) -> tuple[float, float]:
        """The most bytes that a name and a path may have in the folder."""
        if sys.platform != "win32":
            with CHECKPOINT.explained("Cannot save a checkpoint", self.folder):
                name = os.pathconf(self.folder, "PC_NAME_MAX")
                return name, os.pathconf(self.folder, "PC_PATH_MAX")
        return inf, inf  # Windows cannot say it.

    def _error(self, what: str, code: int, found: str) -> Any:
        return CHECKPOINT.error(what, code, self.folder, found)
