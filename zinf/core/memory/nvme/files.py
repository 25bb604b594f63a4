"""Makes and deletes the files of arrays, and deals them over several drives."""

import errno
import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Lock

import tensorstore as ts

from zinf.core.memory.nvme.array import Layout, NvmeArray, write_metadata
from zinf.core.memory.nvme.checksum import Coverage
from zinf.core.memory.nvme.chunk_file import ChunkFile
from zinf.core.memory.nvme.drive import Drive
from zinf.core.memory.nvme.root import Root
from zinf.core.memory.storage_error import StorageError, from_os_error, from_tensorstore


class Place:
    """A root, the drive that moves its files, and the bytes of the chunks there."""

    def __init__(self, root: Root, drive: Drive, bytes_per_second: float) -> None:
        self.root = root
        self.drive = drive
        self.bytes_per_second = bytes_per_second
        self.used_bytes = 0


class Files:
    """The files of all arrays of a store.

    A new chunk goes to the drive that would finish first if each moved all of its
    chunks. So each drive has a part of every large array in proportion to its speed,
    and all drives work on one request. Zarr readers see one folder for each array, in
    which chunks on other drives are symbolic links.

    Files of freed arrays are reused for new arrays of the same layout. So arrays that
    every step makes anew are overwritten in place, twice as fast as new files.
    """

    def __init__(self, places: Sequence[Place], *, checksums: Coverage) -> None:
        self.places = places
        self._coverage: Coverage = checksums
        self._context = ts.Context({"file_io_sync": False})
        self._place_of: dict[ChunkFile, Place] = {}
        self._numbers = count(1)
        self._spares: list[NvmeArray] = []  # Oldest first.
        self._spare_bytes = 0
        self._lock = Lock()

    def root(self, chunk: ChunkFile) -> Root:
        """The root that `chunk` is in."""
        return self._place_of[chunk].root

    def drive(self, chunk: ChunkFile) -> Drive:
        """The drive that moves the bytes of `chunk`."""
        return self._place_of[chunk].drive

    def take(self, layout: Layout, *, what: str, spare_bytes: int) -> NvmeArray:
        """Files for a new array, marked as never written.

        Args:
            what: what errors begin with.
            spare_bytes: new limit on the bytes of files that no array uses.

        Raises:
            StorageError: no drive has room, or none can be written.
        """
        with self._lock:
            for index, spare in enumerate(self._spares):
                if spare.layout == layout and spare.folder.is_dir():
                    del self._spares[index]
                    self._spare_bytes -= layout.spec.nbytes
                    spare.forget()
                    return spare
        self.delete_spares(spare_bytes)
        return self._make(layout, what)

    def give_back(self, array: NvmeArray, *, spare_bytes: int) -> None:
        """Keep the files of a freed array for reuse, within `spare_bytes`."""
        with self._lock:
            self._spares.append(array)
            self._spare_bytes += array.spec.nbytes
        self.delete_spares(spare_bytes)

    def delete_spares(self, limit_bytes: int) -> None:
        while True:
            with self._lock:
                if self._spare_bytes <= limit_bytes:
                    return
                array = self._spares.pop(0)
                self._spare_bytes -= array.spec.nbytes
            self._delete(array.folder.name, array.chunks)

    def _make(self, layout: Layout, what: str) -> NvmeArray:
        name = f"{next(self._numbers):06d}"
        home = self._fastest(0)[0]
        folder = home.root.arrays / name
        chunks: list[ChunkFile] = []
        try:
            timeout = home.drive.stall_seconds
            write_metadata(folder, layout, self._context, timeout_seconds=timeout)
            for run in layout.runs():
                chunks.append(self._make_chunk(folder, layout, run, what))
        except BaseException as error:
            self._delete(name, chunks)
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise from_os_error(what, folder, error) from error
            if isinstance(error, ValueError):
                raise from_tensorstore(what, folder, error) from error
            raise
        return NvmeArray(folder, layout, chunks)

    def _make_chunk(
        self, folder: Path, layout: Layout, run: tuple[str, int, int], what: str
    ) -> ChunkFile:
        """The file of a chunk, on the fastest drive that has room for it."""
        name, start, nbytes = run
        full: OSError | None = None
        for place in self._fastest(layout.chunk_bytes):
            own = place.root.arrays / folder.name
            chunk = ChunkFile(
                own / name,
                start=start,
                nbytes=nbytes,
                file_bytes=layout.chunk_bytes,
                coverage=self._coverage,
            )
            try:
                own.mkdir(mode=0o700, exist_ok=True)
                place.drive.run(what, chunk.allocate)
            except OSError as error:
                chunk.path.unlink(missing_ok=True)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                full = error
                continue
            if own != folder:
                (folder / name).symlink_to(chunk.path)
            with self._lock:
                self._place_of[chunk] = place
                place.used_bytes += chunk.file_bytes
            return chunk
        assert full is not None
        raise full

    def _fastest(self, nbytes: int) -> list[Place]:
        """The places, ordered by when they would have moved `nbytes` more."""
        with self._lock:
            return sorted(
                self.places,
                key=lambda p: (p.used_bytes + nbytes) / p.bytes_per_second,
            )

    def _delete(self, name: str, chunks: Sequence[ChunkFile]) -> None:
        for chunk in chunks:
            with self._lock:
                place = self._place_of.pop(chunk)
                place.used_bytes -= chunk.file_bytes
        for place in self.places:
            shutil.rmtree(place.root.arrays / name, ignore_errors=True)
