"""The NVMe tier: arrays in files, one zarr array each, on one or several drives."""

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import tensorstore as ts

from zinf.memory.ledger import Ledger
from zinf.memory.root import Root
from zinf.memory.space import check_space
from zinf.memory.storage_error import (
    from_os_error,
    from_tensorstore,
    storage_error,
)
from zinf.memory.store import (
    AbstractStore,
    check_kind,
    check_replaces,
    check_rows,
    unknown_array,
)
from zinf.memory.zarr_array import IN_FLIGHT_BYTES, Rows, ZarrArray, storage_context
from zinf.program import ArrayId, ArraySpec, Tier


class NvmeStore(AbstractStore):
    """Arrays in files under `paths`, each folder locked for this store alone.

    An array is a zarr v3 array in `<one of paths>/<role>/<key path>/` that any zarr
    reader opens while it is not being written. Its folder is the one with the fewest
    bytes so far, which deals arrays of one size in turn.

    `read` gives an aligned array that the caller owns; `write` takes a NumPy array,
    which must not change until its future is done. What fails with files raises
    StorageError, from the future or at once. `read_bytes` and `written_bytes` count
    the array bytes of finished reads and writes since the start.
    """

    tier = Tier.NVME

    def __init__(
        self, paths: Sequence[Path], capacity_bytes: int | None = None
    ) -> None:
        self.ledger = Ledger(Tier.NVME, capacity_bytes)
        self.read_bytes = 0
        self.written_bytes = 0
        self._context = storage_context()
        self._arrays: dict[ArrayId, ZarrArray] = {}
        self._under_way: set[Future[Any]] = set()
        self._lock = Lock()  # For counters, futures and roots; dicts are atomic.
        self._roots: list[Root] = []
        try:
            for path in paths:
                self._roots.append(Root(path))
        except BaseException:
            self.close()
            raise
        self._root_bytes = [0] * len(self._roots)
        self._root_of: dict[ArrayId, int] = {}

    def check_space(self, needed_bytes: int) -> None:
        """Raise StorageError unless `needed_bytes` more can be written to the drives.

        For before the first array is written: a full drive is then found in a second,
        not after an hour.
        """
        folders = [root.path for root in self._roots]
        check_space(folders, needed_bytes, spare_bytes=IN_FLIGHT_BYTES)

    def create(
        self, array: ArrayId, spec: ArraySpec, rows_per_chunk: int | None = None
    ) -> None:
        """Declare `array` before it is written, and count its bytes as held.

        Args:
            rows_per_chunk: how many rows of the leading dim will be read or written
                together. Rows that start and stop at its multiples have files of their
                own; others work too, by reading and rewriting the files they share.

        Raises:
            BudgetExceeded: it does not fit in the tier.
            ValueError: it was created before.
            StorageError: its folder or metadata cannot be written.
        """
        if array in self._arrays:
            raise ValueError(f"{array} is on tier nvme already. Free it first.")
        with self.ledger.holding(spec.nbytes, str(array)):
            folder = self._place(array, spec.nbytes)
            try:
                self._arrays[array] = ZarrArray(
                    folder, spec, rows_per_chunk=rows_per_chunk, context=self._context
                )
            except BaseException as error:
                self._unplace(array, spec.nbytes)
                if not isinstance(error, Exception):
                    raise
                what = f"Cannot create {array}"
                raise from_tensorstore(what, folder, error) from error

    def read(self, array: ArrayId) -> Future[np.ndarray]:
        stored, rows = self._find(array)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        if not stored.is_written(rows):
            raise storage_error(
                f"Cannot read {array}",
                errno.ENODATA,
                stored.folder,
                "it was created, but never (or not wholly) written",
            )

        def begin() -> tuple[np.ndarray, ts.Future[Any]]:
            return stored.read(rows)

        def count(value: np.ndarray) -> None:
            with self._lock:
                self.read_bytes += value.nbytes

        return self._start(f"Cannot read {array}", stored, begin, count)

    def write(self, array: ArrayId, value: np.ndarray) -> Future[None]:
        check_kind(array, value, self.tier, np.ndarray)
        stored, rows = self._find(array)
        if stored is None:
            spec = ArraySpec(value.shape, value.dtype.name, value.dtype.itemsize)
            self.create(array, spec)
            stored = self._arrays[array]
        else:
            shape = stored.shape_of(rows)
            check_replaces(array, value, shape=shape, dtype=stored.dtype)

        def begin() -> tuple[None, ts.Future[Any]]:
            return None, stored.write(rows, value)

        def count(_: None) -> None:
            stored.mark_written(rows)
            with self._lock:
                self.written_bytes += value.nbytes

        return self._start(f"Cannot write {array}", stored, begin, count)

    def free(self, array: ArrayId) -> None:
        stored = self._arrays.pop(array, None)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        try:
            stored.delete()
        except OSError as error:
            what = f"Cannot delete {array}"
            raise from_os_error(what, stored.folder, error) from error
        self._unplace(array, stored.spec.nbytes)
        self.ledger.release(stored.spec.nbytes)

    def contains(self, array: ArrayId) -> bool:
        return array in self._arrays or array.whole in self._arrays

    def folder(self, array: ArrayId) -> Path:
        """The folder of the zarr array that keeps `array`, for who wants its files."""
        stored, _ = self._find(array)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        return stored.folder

    def clear(self) -> None:
        """Free every array and delete the folders that they were in."""
        self._drain()
        for array in list(self._arrays):
            self.free(array)
        for root in self._roots:
            root.wipe()

    def close(self) -> None:
        self._drain()
        self._arrays.clear()
        for root in self._roots:
            root.close()

    def _find(self, array: ArrayId) -> tuple[ZarrArray | None, Rows | None]:
        """The zarr array that keeps `array`, and the rows of it that `array` is."""
        stored = self._arrays.get(array)
        if stored is not None or array.rows is None:
            return stored, None
        whole = self._arrays.get(array.whole)
        if whole is None:
            return None, None
        return whole, check_rows(array, whole.spec.shape)

    def _start(
        self,
        what: str,
        stored: ZarrArray,
        begin: Callable[[], tuple[Any, ts.Future[Any]]],
        finish: Callable[[Any], None],
    ) -> Future[Any]:
        """Begin to read or write, and make of TensorStore's future one of ours."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # TensorStore would not stop, either.
        try:
            value, pending = begin()
        except Exception as error:
            raise from_tensorstore(what, stored.folder, error) from error
        with self._lock:
            self._under_way.add(future)

        def settle(done: ts.Future[Any]) -> None:
            error = done.exception()
            if error is None:
                finish(value)
                future.set_result(value)
            else:
                failure = from_tensorstore(what, stored.folder, error)
                failure.__cause__ = error
                future.set_exception(failure)
            with self._lock:
                self._under_way.discard(future)

        pending.add_done_callback(settle)
        return future

    def _drain(self) -> None:
        """Wait for all reads and writes, those that fail too."""
        with self._lock:
            under_way = list(self._under_way)
        wait(under_way)

    def _place(self, array: ArrayId, nbytes: int) -> Path:
        """Choose the root of a new array and say which folder is its own."""
        with self._lock:
            root = min(range(len(self._roots)), key=self._root_bytes.__getitem__)
            folder = self._roots[root].folder(array)
            self._root_bytes[root] += nbytes
            self._root_of[array] = root
        return folder

    def _unplace(self, array: ArrayId, nbytes: int) -> None:
        with self._lock:
            self._root_bytes[self._root_of.pop(array)] -= nbytes
