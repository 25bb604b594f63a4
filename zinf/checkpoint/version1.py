"""Checkpoints of format 1: chunks that hold zarr's own crc32c, read by TensorStore."""

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from zinf.checkpoint.failure import explain, failure
from zinf.checkpoint.grid import Index, chunk_name, whole_box
from zinf.checkpoint.manifest import StoredArray
from zinf.checkpoint.source import (
    MAX_METADATA_BYTES,
    AbstractSource,
    Damage,
)
from zinf.memory import StorageError
from zinf.memory.nvme import Drive
from zinf.memory.nvme.open_file import Mover
from zinf.memory.nvme.request import Request
from zinf.memory.zarr_format import METADATA, numpy_dtype, zarr_spec
from zinf.program import ArrayId
from zinf.sharding import Box

# Every byte is used once, so a cache would only hold it twice.
CONTEXT = {"cache_pool": {"total_bytes_limit": 0}}

# Behind the content of every chunk.
CRC_BYTES = 4


class TensorStoreSource(AbstractSource):
    """An array of a checkpoint of format 1, whose chunks are always verified.

    That the checksum is in the chunk, behind its content, is why a chunk file of the
    NVMe tier could not be linked into such a checkpoint, and why there is format 2.
    """

    def __init__(
        self, array: ArrayId, stored: StoredArray, folder: Path, drive: Drive
    ) -> None:
        self.array, self.stored, self.folder = array, stored, folder
        self._drive = drive
        self._context = ts.Context(CONTEXT)

    def read(self, box: Box, *, verify: bool) -> Future[np.ndarray]:
        found: list[np.ndarray] = []

        def read(mover: Mover) -> None:
            try:
                found.append(self._read(box))
            except StorageError:
                raise
            except (OSError, ValueError, NotImplementedError) as error:
                raise failure(mover.what, self.folder, error) from error

        request = Request(f"Cannot read {self.array}", 1, partial(found.pop))
        self._drive.submit("read", request, [read])
        return request.future

    def damages(self) -> Iterator[Damage]:
        num_chunks = self.stored.grid.num_chunks
        num_files = sum(1 for _ in self.folder.iterdir()) if self.folder.is_dir() else 0
        if num_chunks > num_files:
            found = f"it has {num_files} files, and {num_chunks} chunks"
            yield Damage(self.array, None, self.folder, found)
            return
        if not num_chunks:
            yield from self._damage(whole_box(self.stored.grid.spec.shape), None)
        for index in self.stored.grid.indices():
            yield from self._damage(self.stored.grid.box(index), index)

    def _damage(self, box: Box, index: Index | None) -> Iterator[Damage]:
        try:
            self.read(box, verify=True).result()
        except OSError as error:
            name = METADATA if index is None else chunk_name(index)
            yield Damage(self.array, index, self.folder / name, str(error))

    def _read(self, box: Box) -> np.ndarray:
        grid = self.stored.grid
        _check_plain(self.folder / METADATA, MAX_METADATA_BYTES)
        for index in grid.meeting(box):
            path = self.folder / chunk_name(index)
            _check_plain(path, grid.chunk_bytes + CRC_BYTES)
        array = ts.open(self._spec(), context=self._context, open=True).result()
        content = array[tuple(slice(*edges) for edges in box)].read().result()
        return np.asarray(content).view(numpy_dtype(grid.spec.dtype))

    def _spec(self) -> dict[str, Any]:
        grid = self.stored.grid
        return zarr_spec(self.folder, grid.spec, grid.chunk, codecs=["crc32c"])


def _check_plain(path: Path, max_bytes: int) -> None:
    """Raise unless a file is one, and no larger: TensorStore would follow a link out of
    the checkpoint, and wait for a pipe."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
        found = f"it is a link, or no file, or has more than {max_bytes:,} bytes"
        raise explain("Cannot read", errno.EIO, path, found)
