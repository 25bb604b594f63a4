"""Reads a checkpoint array by array, and verifies what it reads."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from zinf.checkpoint.failure import explain
from zinf.checkpoint.grid import Grid, folder_name, whole_box
from zinf.checkpoint.manifest import FILE
from zinf.checkpoint.parse import read_manifest
from zinf.checkpoint.source import ChunkSource, Damage
from zinf.memory.nvme import Drive
from zinf.program import ArrayId, ArraySpec
from zinf.sharding import Box

__all__ = ["Damage", "Saved"]


class Saved:
    """The checkpoint in a folder that has a manifest.

    Opening reads only the manifest. No code of the checkpoint is executed or unpickled,
    nothing is written, and no file outside the folder is read. The first read starts
    threads: use `with`, or call `close`. Several threads may read at once.

    Attributes:
        arrays: shape and dtype of every array, by its id without rows.
        scalars: the JSON values that were saved with the arrays.
        data: where the training data is read next, as JSON.

    Raises:
        FileNotFoundError: there is no checkpoint, or it is not complete.
        StorageError: the manifest is damaged or has impossible values, or the folder of
            an array is a link out of the checkpoint.
        ValueError: the checkpoint has another format.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).absolute()
        self._manifest = read_manifest(self.directory)
        self.arrays: dict[ArrayId, ArraySpec] = self._manifest.specs
        self.scalars: dict[str, Any] = self._manifest.scalars
        self.data: Any = self._manifest.data
        self._sources: dict[ArrayId, ChunkSource] = {}
        self._refuse_links()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if "_drive" in vars(self):
            self._sources.clear()
            self._drive.close()
            del self._drive

    def read(
        self,
        array: ArrayId,
        rows: tuple[int, int] | None = None,
        verify: bool = True,
    ) -> np.ndarray:
        """An array, or rows of its leading dim, in aligned memory that is the caller's.

        Args:
            verify: compare every chunk that is read with its checksum. A chunk is then
                read as a whole, even if only a part of it is needed.

        Raises:
            KeyError: the checkpoint has no such array.
            StorageError: a file is missing, damaged or cannot be read; the error names
                the file.
        """
        rows = rows or array.rows
        box = whole_box(self.arrays[array.whole].shape)
        if rows is not None:
            box = (rows, *box[1:])
        return self.begin_read(array.whole, box, verify=verify).result()

    def begin_read(
        self, array: ArrayId, box: Box, *, verify: bool = True
    ) -> Future[np.ndarray]:
        """Begin to read a part of an array; `box` has a range along each dim."""
        shape = self.arrays[array].shape
        is_inside = len(box) == len(shape) and all(
            0 <= low <= high <= size
            for (low, high), size in zip(box, shape, strict=True)
        )
        if not is_inside:
            raise ValueError(f"{array} has shape {list(shape)}, and no part {box}.")
        return self._source(array).read(box, verify=verify)

    def grid(self, array: ArrayId) -> Grid:
        """How an array is cut into chunk files."""
        return self._manifest.arrays[array].grid

    def folder(self, array: ArrayId) -> Path:
        """The folder of the zarr array that holds an array."""
        return self.directory / folder_name(array)

    def verify(self) -> Iterator[Damage]:
        """Read all arrays, and yield every file that differs from what was saved."""
        for array in self.arrays:
            yield from self._source(array).damages()

    def _source(self, array: ArrayId) -> ChunkSource:
        if array not in self._sources:
            stored, folder = self._manifest.arrays[array], self.folder(array)
            self._sources[array] = ChunkSource(array, stored, folder, self._drive)
        return self._sources[array]

    @cached_property
    def _drive(self) -> Drive:
        return Drive(self.directory, probe=self.directory / FILE)

    def _refuse_links(self) -> None:
        """Raise StorageError if a folder on the way to the chunks is a link."""
        top = os.path.realpath(self.directory)
        for array in self.arrays:
            name = folder_name(array)
            if os.path.realpath(self.folder(array)) != os.path.join(top, name):
                found = f"the folder of {array} is, or is in, a link to elsewhere"
                what = "Cannot use the checkpoint"
                raise explain(what, errno.EIO, self.folder(array), found)
