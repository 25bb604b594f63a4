"""One chunk of an array: a file, what it is known to hold, and how it is replaced."""

import errno
import os
from pathlib import Path
from threading import Lock

import numpy as np

from zinf.core.memory.host.aligned import aligned_empty
from zinf.core.memory.nvme.checksum import Checksum, Coverage, Summer, next_summer
from zinf.core.memory.nvme.open_file import (
    STAGING_BYTES,
    Bytes,
    Each,
    Mover,
    OpenFile,
)
from zinf.core.memory.storage_error import StorageError, storage_error


class ChunkFile:
    """The file of bytes `start` to `start + nbytes` of an array.

    It is overwritten in place as long as nothing else refers to it: drives overwrite
    files twice as fast as they write new ones. While a hard link to the file exists
    (of a checkpoint), or a read of it is in flight, a write makes a new file and
    renames it into place.

    A write that fails in place leaves neither the old content nor the new one. Reads
    then fail until the chunk is written as a whole.

    Args:
        path: the file, of `file_bytes`: the bytes of the chunk, then padding.
        coverage: which bytes the checksum covers. It is kept at each write and compared
            at each read.
    """

    __slots__ = (
        "_checksum",
        "_count_lock",
        "_coverage",
        "_is_damaged",
        "_lock",
        "_num_readers",
        "_num_writes",
        "file_bytes",
        "nbytes",
        "path",
        "start",
    )

    def __init__(
        self,
        path: Path,
        *,
        start: int,
        nbytes: int,
        file_bytes: int,
        coverage: Coverage = "full",
    ) -> None:
        self.path = path
        self.start = start
        self.nbytes = nbytes
        self.file_bytes = file_bytes
        self._coverage: Coverage = coverage
        self._checksum: Checksum | None = None
        self._is_damaged = False
        self._num_readers = 0
        # Neighbouring chunks begin with different windows.
        self._num_writes = start // max(1, nbytes)
        self._lock = Lock()
        self._count_lock = Lock()

    def allocate(self, mover: Mover) -> None:
        """Make the file, filled with zeros."""
        with mover.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
            file.allocate(self.file_bytes)

    def forget(self) -> None:
        """Mark the content as never written: without checksum, and not damaged."""
        self._checksum, self._is_damaged = None, False

    def read(self, low: int, high: int, memory: Bytes, mover: Mover) -> None:
        """Fill `memory` with bytes `low` to `high` of the chunk, and check the chunk.

        Raises:
            StorageError: a system call failed, the file has another size or content
                than was written, or the last write failed.
        """
        if not self._lock.acquire(blocking=not mover.only_cached):
            raise BlockingIOError(errno.EAGAIN, "the chunk is being written")
        try:
            # The file opened here has this checksum, even if a write replaces it later.
            expected = self._checksum
            file = self._open(mover)
            self._count_reader(1)
        finally:
            self._lock.release()
        try:
            with file:
                if high - low < self.nbytes:
                    whole = aligned_empty((self.nbytes,), np.uint8)
                    self._read_whole(file, whole, expected, mover)
                    np.copyto(memory, whole[low:high])
                else:
                    self._read_whole(file, memory, expected, mover)
        finally:
            self._count_reader(-1)

    def write(self, low: int, high: int, memory: Bytes, mover: Mover) -> None:
        """Replace bytes `low` to `high` of the chunk.

        Raises:
            StorageError: a system call failed; or only a part is written, and the rest
                of the chunk cannot be read.
        """
        with self._lock:
            if high - low < self.nbytes:
                whole = aligned_empty((self.nbytes,), np.uint8)
                with self._open(mover) as file:
                    self._read_whole(file, whole, self._checksum, mover)
                whole[low:high] = memory
                memory = whole
            if not self._overwrite(memory, mover):
                self._replace(memory, mover)

    def link_to(self, path: Path) -> "ChunkFile":
        """Make a hard link `path`, which keeps the present content.

        The next write of this chunk makes a new file. Returns the chunk at `path`,
        which can be read and checked like this one.

        Raises:
            StorageError: the last write failed.
            OSError: the system cannot make a hard link there.
        """
        with self._lock:
            if self._is_damaged:
                what, found = "Cannot link", "the last write of this file failed"
                raise storage_error(what, errno.EIO, self.path, found)
            os.link(self.path, path)
            linked = ChunkFile(
                path,
                start=self.start,
                nbytes=self.nbytes,
                file_bytes=self.file_bytes,
                coverage=self._coverage,
            )
            linked._checksum = self._checksum
        return linked

    def move_to(self, path: Path) -> None:
        """Rename the file within its file system, while nothing else uses it."""
        os.rename(self.path, path)
        self.path = path

    @property
    def full_checksum(self) -> int | None:
        """XXH3 (64 bits) of the whole file, if it is known."""
        known = self._checksum
        if known is None or known.window is not None:
            return None
        return known.value if self.nbytes == self.file_bytes else None

    def check(self, each: Each, mover: Mover, *, durable: bool) -> None:
        """Give the whole file to `each`, part by part, and compare its checksum.

        Args:
            durable: also wait until the content survives a power cut.

        Raises:
            StorageError: a system call failed, or this is not what was written.
        """
        with self._open(mover) as file:
            self._check_size(file, mover)
            expected = self._checksum
            summer = Summer(expected.window if expected else None)
            for start in range(0, self.file_bytes, STAGING_BYTES):
                part = mover.staging(min(STAGING_BYTES, self.file_bytes - start))
                file.read(start, part)
                each(part)
                summer.update(part[: max(0, self.nbytes - start)])
            self._compare(summer, expected, mover)
            if durable:
                file.sync()

    def _count_reader(self, change: int) -> None:
        # Not under `_lock`, which a write may hold for long.
        with self._count_lock:
            self._num_readers += change

    def _open(self, mover: Mover) -> OpenFile:
        """Open the file for reading."""
        if self._is_damaged:
            found = "the last write of this file failed"
            raise storage_error(mover.what, errno.EIO, self.path, found)
        return mover.open(self.path, os.O_RDONLY, self.nbytes)

    def _read_whole(
        self, file: OpenFile, memory: Bytes, expected: Checksum | None, mover: Mover
    ) -> None:
        self._check_size(file, mover)
        if expected is None:
            file.read(0, memory)
            return
        summer = Summer(expected.window)
        file.read(0, memory, summer.update)
        self._compare(summer, expected, mover)

    def _check_size(self, file: OpenFile, mover: Mover) -> None:
        size = file.stat().st_size
        if size != self.file_bytes:
            found = f"it has {size:,} bytes instead of {self.file_bytes:,}"
            raise storage_error(mover.what, errno.EIO, self.path, found)

    def _compare(self, summer: Summer, expected: Checksum | None, mover: Mover) -> None:
        checksum = summer.checksum()
        if expected is not None and checksum != expected:
            found = (
                f"checksum {checksum.value:016x} instead of {expected.value:016x}, of "
                f"{self.nbytes:,} bytes from byte 0: this is not what was written"
            )
            raise storage_error(mover.what, errno.EIO, self.path, found)

    def _overwrite(self, memory: Bytes, mover: Mover) -> bool:
        """Write in place if nothing else refers to the file; returns whether it did."""
        if self._num_readers:
            return False
        try:
            file = mover.open(self.path, os.O_RDWR, self.nbytes)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        with file:
            stat = file.stat()
            if stat.st_nlink != 1 or stat.st_size != self.file_bytes:
                return False
            self._is_damaged = True
            self._checksum = self._write_to(file, memory)
            self._is_damaged = False
        return True

    def _replace(self, memory: Bytes, mover: Mover) -> None:
        fresh = self.path.with_name(f"{self.path.name}.new")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
            with mover.open(fresh, flags, self.nbytes) as file:
                file.allocate(self.file_bytes)
                checksum = self._write_to(file, memory)
            mover.replace(fresh, self.path)
        except BaseException:
            mover.discard(fresh)
            raise
        self._checksum, self._is_damaged = checksum, False

    def _write_to(self, file: OpenFile, memory: Bytes) -> Checksum | None:
        self._num_writes += 1
        summer = next_summer(self._coverage, self.nbytes, self._num_writes)
        if summer is None:
            file.write(0, memory)
            return None
        file.write(0, memory, summer.update)
        return summer.checksum()
