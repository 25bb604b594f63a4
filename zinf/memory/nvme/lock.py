"""The lock on a folder of the NVMe tier: one engine uses it at a time."""

import errno
import gc
import os
from pathlib import Path

from zinf.memory.closing import wait_for_closing
from zinf.memory.nvme.system import try_lock, unlock
from zinf.memory.storage_error import StorageError, from_os_error

LOCK = "zinf.lock"
# Device and inode of the lock files that this process holds.
_HELD: set[tuple[int, int]] = set()


class FolderLock:
    """The lock of `folder`, held from construction until `release`.

    If the holder is an engine of this process that nothing refers to any more, waits
    until that engine's stores are closed.

    Raises:
        StorageError: another process, or another engine of this one, holds the lock; or
            the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._file = open(folder / LOCK, "a+", opener=_private)
        except OSError as error:
            raise from_os_error("Cannot write to the folder", folder, error) from error
        found = os.fstat(self._file.fileno())
        self._key = found.st_dev, found.st_ino
        self._process = os.getpid()
        if not (self._try() or self._try_after_dropped()):
            with self._file:
                raise self._refusal(folder)
        _HELD.add(self._key)
        self._file.truncate(0)
        self._file.write(str(self._process))
        self._file.flush()

    def release(self) -> None:
        """Give the lock up; further calls do nothing."""
        if self._file.closed:
            return
        if os.getpid() == self._process:
            _HELD.discard(self._key)
            # If the file were only closed, forked children would keep the lock.
            unlock(self._file.fileno())
        self._file.close()

    def _try(self) -> bool:
        return try_lock(self._file.fileno())

    def _try_after_dropped(self) -> bool:
        """Closes dropped engines and tries again, if this process has the lock."""
        if self._key not in _HELD:
            return False
        wait_for_closing()
        if self._try():
            return True
        # A reference cycle through a traceback may be all that keeps the engine alive.
        gc.collect()
        wait_for_closing()
        return self._try()

    def _refusal(self, folder: Path) -> StorageError:
        if self._key in _HELD:
            message = (
                "The NVMe folder is in use by another engine of this process. Close "
                "that engine first, with engine.close() or by making it in "
                "`with zinf.initialize(...) as engine:`. If no variable refers to it "
                "any more, as after an error in a notebook, call zinf.close_all(). Or "
                "name another folder in memory.nvme"
            )
        else:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            message = (
                f"The NVMe folder is in use by process {owner}. Wait for it, end it, "
                "or name another folder in memory.nvme"
            )
        return StorageError(errno.EBUSY, message, str(folder))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
