"""The NVMe tier: arrays in files, on one or several drives."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from zinf.core.memory.hold import Holds
from zinf.core.memory.host.aligned import aligned_empty
from zinf.core.memory.ledger import Ledger
from zinf.core.memory.nvme.array import Layout, NvmeArray, Rows, layout_of
from zinf.core.memory.nvme.checksum import Coverage
from zinf.core.memory.nvme.chunk_file import ChunkFile
from zinf.core.memory.nvme.drive import STALL_SECONDS, Direction, Drive
from zinf.core.memory.nvme.file import as_bytes
from zinf.core.memory.nvme.files import Files, Place
from zinf.core.memory.nvme.index import Index
from zinf.core.memory.nvme.measure import relative_speeds
from zinf.core.memory.nvme.open_file import DIRECT_FROM_BYTES
from zinf.core.memory.nvme.request import Request, Task
from zinf.core.memory.nvme.root import PROBE, Root
from zinf.core.memory.nvme.space import check_space
from zinf.core.memory.nvme.system import System, check_has_tier
from zinf.core.memory.store import (
    AbstractStore,
    check_kind,
    check_replaces,
    check_rows,
    completed,
    unknown_array,
)
from zinf.core.program import ArrayId, ArraySpec, Tier


class NvmeStore(AbstractStore):
    """Arrays in files under `paths`, each folder locked for this store alone.

    An array is a zarr v3 array that any zarr reader opens while it is not being
    written; `folder` says where it is. Its chunks are dealt over `paths` in proportion
    to their measured speeds, and are moved past the page cache.

    `read` gives an aligned array that the caller owns. `write` takes a NumPy array,
    which must not change until the future is done. Errors of files are StorageErrors,
    raised by the future or at once. `read_bytes` and `written_bytes` count the array
    bytes of finished reads and writes since the start.

    Args:
        paths: folders that are empty, new, or left by an earlier run; best one for each
            drive.
        stall_seconds: how long a drive may take to answer.
        checksums: kept in memory for every chunk and compared on each read. "full" sums
            all bytes; "sampled" 128 KiB of every 2 MiB, others at each write; "off"
            none.
        system: the system calls, for tests.

    Raises:
        NotImplementedError: this is Windows.
        StorageError: a folder is in use, foreign or cannot be written.
    """

    tier = Tier.NVME

    def __init__(
        self,
        paths: Sequence[Path],
        capacity_bytes: int | None = None,
        *,
        stall_seconds: float = STALL_SECONDS,
        checksums: Coverage = "sampled",
        system: System | None = None,
        empty: Callable[[tuple[int, ...], Any], np.ndarray] = aligned_empty,
    ) -> None:
        check_has_tier()
        self._empty = empty
        self.ledger = Ledger(Tier.NVME, capacity_bytes)
        self.holds = Holds()
        self.read_bytes = 0
        self.written_bytes = 0
        self._arrays: dict[ArrayId, NvmeArray] = {}
        self._lock = Lock()  # For the counters; dicts are atomic.
        with ExitStack() as opened:
            self._roots = []
            for path in paths:
                self._roots.append(Root(path))
                opened.callback(self._roots[-1].close)
            self._drives = []
            for root in self._roots:
                drive = Drive(root.path, stall_seconds=stall_seconds, system=system)
                self._drives.append(drive)
                opened.callback(drive.close)
            self._index = Index(self._roots[0].path)
            opened.callback(self._index.close)
            speeds = relative_speeds(self._drives)
            places = map(Place, self._roots, self._drives, speeds)
            self._files = Files(list(places), checksums=checksums)
            self._opened = opened.pop_all()

    def check_space(self, needed_bytes: int) -> None:
        check_space([root.path for root in self._roots], needed_bytes)

    def create(
        self,
        array: ArrayId,
        spec: ArraySpec,
        rows_per_chunk: int | None = None,
        *,
        cut_dims: Collection[int] = (),
    ) -> None:
        if array in self._arrays:
            raise ValueError(f"{array} is on tier nvme already. Free it first.")
        layout = layout_of(spec, rows_per_chunk, cut_dims)
        with self.ledger.holding(spec.nbytes, str(array)):
            made = self._files.take(
                layout, what=f"Cannot create {array}", spare_bytes=self._spare_bytes()
            )
            self._arrays[array] = made
        self._index.add(made.folder.name, array, spec)

    def rows_per_chunk(self, array: ArrayId) -> int:
        chunk = self._stored(array).layout.chunk
        return chunk[0] if chunk else 1

    def read(self, array: ArrayId) -> Future[np.ndarray]:
        stored, rows = self._find(array)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        what = f"Cannot read {array}"
        stored.check_written(rows, what)
        value = self._empty(stored.shape_of(rows), stored.dtype)

        def finish() -> np.ndarray:
            with self._lock:
                self.read_bytes += value.nbytes
            return value

        tasks = stored.reads(rows, as_bytes(value))
        if self._read_cached(tasks):
            return completed(finish())
        return self._start("read", what, stored, tasks, finish)

    def write(self, array: ArrayId, value: np.ndarray) -> Future[None]:
        check_kind(array, value, self.tier, np.ndarray)
        self.holds.wait(array)
        if not value.dtype.isnative:  # Files have this machine's byte order.
            value = value.astype(value.dtype.newbyteorder("="))
        stored, rows = self._find(array)
        if stored is None:
            spec = ArraySpec(value.shape, value.dtype.name, value.dtype.itemsize)
            self.create(array, spec)
            stored = self._arrays[array]
        else:
            shape = stored.shape_of(rows)
            check_replaces(array, value, shape=shape, dtype=stored.dtype)

        def finish() -> None:
            stored.mark_written(rows)
            with self._lock:
                self.written_bytes += value.nbytes

        content = as_bytes(np.ascontiguousarray(value))
        tasks = stored.writes(rows, content)
        # If one of several files cannot be written, the others must not be read either.
        stored.mark_written(rows, is_written=False)
        return self._start("write", f"Cannot write {array}", stored, tasks, finish)

    def free(self, array: ArrayId) -> None:
        self.holds.wait(array)
        stored = self._arrays.pop(array, None)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        wait(stored.pending.copy())  # Another array may get its files.
        self._index.remove(stored.folder.name)
        self.ledger.release(stored.spec.nbytes)
        self._files.give_back(stored, spare_bytes=self._spare_bytes())

    def contains(self, array: ArrayId) -> bool:
        return array in self._arrays or array.whole in self._arrays

    def folder(self, array: ArrayId) -> Path:
        """The folder of the zarr array that keeps `array`."""
        return self._stored(array).folder

    def chunk_files(self, array: ArrayId) -> list[Path]:
        """The files of the array that keeps `array`, in order of its memory."""
        return [chunk.path for chunk in self._stored(array).chunks]

    def layout(self, array: ArrayId) -> Layout:
        """How the array that keeps `array` is cut into files."""
        return self._stored(array).layout

    def chunks(self, array: ArrayId) -> Iterator[tuple[str, ChunkFile]]:
        """The name in zarr and the file of each chunk that holds some of `array`.

        The caller may link to the files while nothing writes to them.

        Raises:
            StorageError: some of `array` was never written, or its last write failed.
        """
        stored, rows = self._find(array)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        stored.check_written(rows, f"Cannot link {array}")
        return stored.chunks_of(rows)

    def drive(self, chunk: ChunkFile) -> Drive:
        """The drive that moves the bytes of `chunk`."""
        return self._files.drive(chunk)

    def scratch(self, chunk: ChunkFile, name: str) -> Path:
        """A folder for links to `chunk`; if it is left over, a later run deletes it."""
        return self._files.root(chunk).path / f"{PROBE}{name}"

    def clear(self) -> None:
        """Free every array and delete the folders that they were in."""
        self._flush()
        for array in list(self._arrays):
            self.free(array)
        self._files.delete_spares(0)

    def close(self) -> None:
        self._flush()
        self._arrays.clear()
        self._opened.close()

    def _stored(self, array: ArrayId) -> NvmeArray:
        stored, _ = self._find(array)
        if stored is None:
            raise unknown_array(array, self.tier, list(self._arrays))
        return stored

    def _find(self, array: ArrayId) -> tuple[NvmeArray | None, Rows | None]:
        """The stored array that keeps `array`, and the rows of it that `array` is."""
        stored = self._arrays.get(array)
        if stored is not None or array.rows is None:
            return stored, None
        whole = self._arrays.get(array.whole)
        if whole is None:
            return None, None
        return whole, check_rows(array, whole.spec.shape)

    def _start(
        self,
        direction: Direction,
        what: str,
        stored: NvmeArray,
        tasks: Sequence[tuple[ChunkFile, Task]],
        finish: Callable[[], Any],
    ) -> Future[Any]:
        request = Request(what, len(tasks), finish)
        stored.pending.add(request.future)
        request.future.add_done_callback(stored.pending.discard)
        by_drive: dict[Drive, list[Task]] = {}
        for chunk, task in tasks:
            by_drive.setdefault(self._files.drive(chunk), []).append(task)
        for drive, parts in by_drive.items():
            drive.submit(direction, request, parts)
        return request.future

    def _read_cached(self, tasks: Sequence[tuple[ChunkFile, Task]]) -> bool:
        """Run tasks in this thread, if they are small and the page cache has all bytes.

        Waking a thread of the drive takes longer than such a read. The read cannot wait
        for the drive, so it cannot hang the caller's thread.
        """
        if any(chunk.nbytes >= DIRECT_FROM_BYTES for chunk, _ in tasks):
            return False
        try:
            for chunk, task in tasks:
                drive = self._files.drive(chunk)
                if drive.is_stalled:
                    return False
                task(drive.mover(only_cached=True))
        except OSError:
            return False  # Threads of the drive try again, and report errors.
        return True

    def _flush(self) -> None:
        for drive in self._drives:
            drive.flush()

    def _spare_bytes(self) -> int:
        """Limit on the bytes of unused files, so that files never exceed the peak."""
        return self.ledger.peak_bytes - self.ledger.used_bytes
