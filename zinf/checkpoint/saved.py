"""Reads a checkpoint array by array, and verifies what it reads."""

from collections.abc import Iterator
from concurrent.futures import Future
from os import PathLike
from typing import Any, Self

import numpy as np

from zinf.checkpoint.bucket.files import ObjectFiles
from zinf.checkpoint.files import AbstractFiles, LocalFiles
from zinf.checkpoint.grid import Grid, folder_name, whole_box
from zinf.checkpoint.place import ObjectFolder, Place, as_place
from zinf.checkpoint.source import ChunkSource, Damage
from zinf.core.program import ArrayId, ArraySpec
from zinf.core.sharding import Box

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
        written_by: the version of zinf that wrote it.

    Raises:
        FileNotFoundError: there is no checkpoint, or it is not complete.
        StorageError: the manifest is damaged or has impossible values, or the folder of
            an array is a link out of the checkpoint.
        ValueError: the checkpoint has another format.
    """

    def __init__(self, directory: str | PathLike[str] | ObjectFolder) -> None:
        self.directory = as_place(directory)
        self._files: AbstractFiles = (
            ObjectFiles(self.directory)
            if isinstance(self.directory, ObjectFolder)
            else LocalFiles(self.directory)
        )
        self._manifest = self._files.manifest()
        self.arrays: dict[ArrayId, ArraySpec] = self._manifest.specs
        self.scalars: dict[str, Any] = self._manifest.scalars
        self.data: Any = self._manifest.data
        self.written_by = self._manifest.written_by
        self._sources: dict[ArrayId, ChunkSource] = {}
        self._files.check(self.arrays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sources.clear()
        self._files.close()

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

    @property
    def staging_bytes(self) -> int:
        """Host bytes that reads take at once, beside the arrays that they return."""
        chunks = (s.grid.chunk_bytes for s in self._manifest.arrays.values())
        return self._files.staging_bytes(max(chunks, default=0))

    def folder(self, array: ArrayId) -> Place:
        """The folder of the zarr array that holds an array."""
        return self.directory / folder_name(array)

    def verify(self) -> Iterator[Damage]:
        """Read all arrays, and yield every file that differs from what was saved."""
        for array in self.arrays:
            yield from self._source(array).damages()

    def _source(self, array: ArrayId) -> ChunkSource:
        if array not in self._sources:
            stored = self._manifest.arrays[array]
            self._sources[array] = self._files.source(array, stored)
        return self._sources[array]
