"""Checkpoints of format 1: chunks that hold zarr's own crc32c, read by TensorStore."""

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from zinf.checkpoint.failure import failure
from zinf.checkpoint.grid import chunk_name
from zinf.checkpoint.manifest import StoredArray
from zinf.checkpoint.source import AbstractSource, Damage
from zinf.memory.nvme import Drive
from zinf.memory.nvme.open_file import Mover
from zinf.memory.nvme.request import Request
from zinf.memory.zarr_format import numpy_dtype, zarr_spec
from zinf.program import ArrayId
from zinf.sharding import Box

# Every byte is used once, so a cache would only hold it twice.
CONTEXT = {"cache_pool": {"total_bytes_limit": 0}}


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
            except (OSError, ValueError, NotImplementedError) as error:
                raise failure(mover.what, self.folder, error) from error

        request = Request(f"Cannot read {self.array}", 1, partial(found.pop))
        self._drive.submit("read", request, [read])
        return request.future

    def damages(self) -> Iterator[Damage]:
        for index in self.stored.grid.indices():
            try:
                self.read(self.stored.grid.box(index), verify=True).result()
            except OSError as error:
                file = self.folder / chunk_name(index)
                yield Damage(self.array, index, file, str(error))

    def _read(self, box: Box) -> np.ndarray:
        grid = self.stored.grid
        array = ts.open(self._spec(), context=self._context, open=True).result()
        content = array[tuple(slice(*edges) for edges in box)].read().result()
        return np.asarray(content).view(numpy_dtype(grid.spec.dtype))

    def _spec(self) -> dict[str, Any]:
        grid = self.stored.grid
        return zarr_spec(self.folder, grid.spec, grid.chunk, codecs=["crc32c"])
