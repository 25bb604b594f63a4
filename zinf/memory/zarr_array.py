"""One array in files: a zarr v3 array, read and written through TensorStore."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from zinf.memory.aligned import aligned_empty
from zinf.memory.chunk import MAX_CHUNK_BYTES, chunk_shape
from zinf.memory.zarr_format import as_stored, numpy_dtype, zarr_spec
from zinf.program import ArraySpec

# Requests and copies under way at once, over all arrays of a store.
FILE_CONCURRENCY = 8
COPY_CONCURRENCY = 4
# What rewriting can take on a drive beside the arrays: new files of old chunks.
IN_FLIGHT_BYTES = FILE_CONCURRENCY * MAX_CHUNK_BYTES

Rows = tuple[int, int]


def storage_context() -> ts.Context:
    """The TensorStore resources that the arrays of one store share."""
    return ts.Context(
        {
            # Each byte is used once between reads, so a cache would only hold it twice.
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": COPY_CONCURRENCY},
            "file_io_concurrency": {"limit": FILE_CONCURRENCY},
            # What was swapped out need not survive a power cut; checkpoints sync.
            "file_io_sync": False,
        }
    )


class ZarrArray:
    """An open array of `spec` in `folder`, which it creates.

    Uncompressed and little-endian: a chunk file is the bytes of the chunk. Every write
    makes a new file and renames it into place, so that a hard link to the old one keeps
    the old content. What was never written cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        spec: ArraySpec,
        *,
        rows_per_chunk: int | None,
        context: ts.Context,
    ) -> None:
        chunk = chunk_shape(spec, rows_per_chunk=rows_per_chunk)
        self.folder = folder
        self.spec = spec
        self._context = context
        self._zarr = ts.open(
            zarr_spec(folder, spec, chunk), context=context, create=True, open=False
        ).result()
        self.dtype = numpy_dtype(spec.dtype)
        self._num_rows = spec.shape[0] if spec.shape else 1
        self._rows_per_chunk = chunk[0] if chunk else 1
        self._is_written = np.zeros(self._num_rows, bool)
        # Indexing costs more than a small read, and the same rows come every step.
        self._views: dict[Rows, ts.TensorStore] = {}

    def shape_of(self, rows: Rows | None) -> tuple[int, ...]:
        if rows is None:
            return self.spec.shape
        return (rows[1] - rows[0], *self.spec.shape[1:])

    def is_written(self, rows: Rows | None) -> bool:
        """Whether all of `rows` were written since the array was made."""
        return bool(self._is_written[_as_slice(rows)].all())

    def mark_written(self, rows: Rows | None) -> None:
        self._is_written[_as_slice(rows)] = True

    def read(self, rows: Rows | None) -> tuple[np.ndarray, ts.Future[Any]]:
        """Fresh aligned memory, and the future that is done when `rows` are in it."""
        result = aligned_empty(self.shape_of(rows), self.dtype)
        target = ts.array(as_stored(result), context=self._context)
        return result, target.write(self._view(rows)).commit

    def write(self, rows: Rows | None, value: np.ndarray) -> ts.Future[Any]:
        """Write `value`, which must not change until the future is done."""
        self._require_rewritten_chunks(rows)
        return (
            self._view(rows)
            .write(as_stored(value), can_reference_source_data_indefinitely=True)
            .commit
        )

    def delete(self) -> None:
        """Delete the files of this array, and no other's that are deeper in.

        The folder stays, for the next array of that name: on ext4, removing one costs
        several times what writing a small array does.
        """
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    os.unlink(entry)

    def _view(self, rows: Rows | None) -> ts.TensorStore:
        if rows is None:
            return self._zarr
        view = self._views.get(rows)
        if view is None:
            view = self._views[rows] = self._zarr[rows[0] : rows[1]]
        return view

    def _require_rewritten_chunks(self, rows: Rows | None) -> None:
        """Fail if a chunk of which `rows` are a part had other rows and is gone.

        TensorStore reads such a chunk to write it whole again, but takes a file that is
        missing for one never written, and would put zeros in place of the other rows.
        """
        if rows is None:
            return
        for edge in rows:
            if edge % self._rows_per_chunk == 0 or edge == self._num_rows:
                continue
            start = edge - edge % self._rows_per_chunk
            chunk = slice(start, min(start + self._rows_per_chunk, self._num_rows))
            if self._is_written[chunk].any():
                self._zarr[chunk].read().result()


def _as_slice(rows: Rows | None) -> slice:
    return slice(None) if rows is None else slice(*rows)
