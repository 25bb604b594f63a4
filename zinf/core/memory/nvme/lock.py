"""The lock on a folder of the NVMe tier: one engine uses it at a time."""

import errno
import gc
import os
from pathlib import Path

from zinf.core.memory.closing import wait_for_closing
from zinf.core.memory.lock_file import LockFile
from zinf.core.memory.nvme.system import check_has_tier
from zinf.core.memory.storage_error import StorageError

LOCK = "zinf.lock"
# Device and inode of the lock files that this process holds.
_HELD: set[tuple[int, int]] = set()


class FolderLock:
    """The lock of `folder`, held from construction until `release`.

    If the holder is an engine of this process that nothing refers to any more, waits
    until that engine's stores are closed.

    Raises:
        StorageError: another process, or another engine of this one, holds the lock; or
            the folder cannot be written; or it has another file of the lock's name.
    """

    def __init__(self, folder: Path) -> None:
        check_has_tier()
        self._file = LockFile(folder / LOCK)
        self._is_held = False
        found = os.fstat(self._file.descriptor)
        self._key = found.st_dev, found.st_ino
        self._process = os.getpid()
        try:
            if not (self._file.try_lock() or self._try_after_dropped()):
                raise self._refusal(folder)
            self._file.claim()
        except BaseException:
            self._file.close()
            raise
        self._is_held = True
        _HELD.add(self._key)

    def release(self) -> None:
        """Give the lock up; further calls do nothing."""
        if not self._is_held:
            return
        self._is_held = False
        if os.getpid() == self._process:
            _HELD.discard(self._key)
            self._file.unlock()
        self._file.close()

    def _try_after_dropped(self) -> bool:
        """Closes dropped engines and tries again, if this process has the lock."""
        if self._key not in _HELD:
            return False
        wait_for_closing()
        if self._file.try_lock():
            return True
        # A reference cycle through a traceback may be all that keeps the engine alive.
        gc.collect()
        wait_for_closing()
        return self._file.try_lock()

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
            message = (
                f"The NVMe folder is in use by {self._file.holder()}. Wait for it, end "
                "it, or name another folder in memory.nvme"
            )
        return StorageError(errno.EBUSY, message, str(folder))
