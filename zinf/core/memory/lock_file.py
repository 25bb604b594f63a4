"""A lock on a path, held by a file that says who has it."""

import errno
import json
import logging
import os
import shlex
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep

from zinf.core.memory.nvme.system import O_NOFOLLOW, try_lock, unlock
from zinf.core.memory.storage_error import StorageError, from_os_error
from zinf.core.text.json_text import from_json

# Bytes of a lock file that are read: more than any that zinf writes.
MOST_BYTES = 65536
# Errors of file systems without locks.
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

POLL_SECONDS = 0.2

logger = logging.getLogger(__name__)


class LockFile:
    """The file at `path`, open and not yet locked; symbolic links are not followed.

    Raises:
        StorageError: the file is none of zinf's lock files, and is left as it is; or it
            cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            flags = os.O_RDWR | os.O_CREAT | O_NOFOLLOW | getattr(os, "O_NONBLOCK", 0)
            self.descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno == errno.ELOOP or path.is_symlink():
                raise self._foreign("is a symbolic link") from error
            raise from_os_error("Cannot write the lock", path, error) from error
        try:
            self._check_content()
        except BaseException:
            self.close()
            raise

    def try_lock(self) -> bool:
        return try_lock(self.descriptor)

    def claim(self) -> None:
        """Write into the locked file who has it."""
        self._check_content()
        about = {
            "locked_by": "zinf",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": shlex.join(sys.argv)[: MOST_BYTES // 16],
        }
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        os.write(self.descriptor, json.dumps(about).encode() + b"\n")

    def holder(self) -> str:
        """Who has the lock: process, host and command, as far as the file says."""
        content = self._content().strip()
        if content.isdigit():  # Of zinf 0.1, which wrote the process alone.
            return f"process {content.decode()}"
        try:
            about = from_json(content)
            pid, host, command = (about[key] for key in ("pid", "host", "command"))
        except (ValueError, KeyError, TypeError):
            return "process unknown"
        return f"process {pid} on host {host} ({command})"

    def is_in_place(self) -> bool:
        """Whether `path` still is this file: the holder before may have deleted it."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return False
        here = os.fstat(self.descriptor)
        return (found.st_dev, found.st_ino) == (here.st_dev, here.st_ino)

    def unlock(self) -> None:
        # If the file were only closed, forked children would keep the lock.
        unlock(self.descriptor)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _content(self) -> bytes:
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return os.read(self.descriptor, MOST_BYTES)

    def _check_content(self) -> None:
        """Raise unless the file is new, or holds what a lock of zinf holds."""
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise self._foreign("is no regular file")
        content = self._content().strip()
        if not content or content.isdigit():
            return
        try:
            about = from_json(content)
        except ValueError:
            about = None
        if not isinstance(about, dict) or about.get("locked_by") != "zinf":
            raise self._foreign(f"holds {found.st_size:,} bytes of something else")

    def _foreign(self, what: str) -> StorageError:
        return StorageError(
            errno.EEXIST,
            f"zinf keeps a lock in a file of this name, and the one that is there "
            f"{what}. It is left as it is. Move it away, or name another folder",
            str(self.path),
        )


def lock_of_folder(folder: Path) -> Path:
    """Where the lock on a folder that zinf writes to is: in it."""
    return folder / "run.lock"


def lock_beside(path: Path) -> Path:
    """Where the lock on a file, or on a folder that may be renamed, is: beside it."""
    return path.with_name(f"{path.name}.lock")


@contextmanager
def locked(
    locks: dict[Path, Path], *, change: str, patience_seconds: float = 0.0
) -> Iterator[None]:
    """Hold locks, each on a path that is written to, until the `with` block ends.

    The lock files are deleted then, and so are folders that were made for them and are
    still empty. If the process is killed, the system gives its locks up. On Windows,
    and on a file system without locks, a warning says that nothing is locked.

    Args:
        locks: the lock file of each path.
        change: the end of the error, such as "name another folder in run.output".
        patience_seconds: how long to wait for the holder of a lock to end.

    Raises:
        StorageError: another run has a lock; the message says which. Or a lock file
            cannot be written, or is none of zinf's.
    """
    if sys.platform == "win32":
        logger.warning(
            "Windows: nothing keeps another run from writing to %s.",
            ", ".join(map(str, locks)),
        )
        yield
        return
    with ExitStack() as held:
        for path, file in locks.items():
            _make_folder(file.parent, held)
            lock = _taken(path, file, change, patience_seconds)
            held.callback(_give_up, lock)
        yield


def _taken(path: Path, file: Path, change: str, patience_seconds: float) -> LockFile:
    """The lock, locked by this process."""
    end = monotonic() + patience_seconds
    while True:
        lock = LockFile(file)
        try:
            if not _is_locked(lock):
                if monotonic() < end:
                    lock.close()
                    sleep(POLL_SECONDS)
                    continue
                raise StorageError(
                    errno.EBUSY,
                    f"{path} is in use by {lock.holder()}. Wait for it, end it, or "
                    f"{change}",
                    str(file),
                )
            if lock.is_in_place():
                lock.claim()
                return lock
            lock.close()
        except BaseException:
            lock.close()
            raise


def _is_locked(lock: LockFile) -> bool:
    try:
        return lock.try_lock()
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise from_os_error("Cannot lock", lock.path, error) from error
        logger.warning(
            "%s is on a file system without locks (%s): nothing keeps another run from "
            "writing there.",
            lock.path,
            error.strerror,
        )
        return True


def _give_up(lock: LockFile) -> None:
    # Deleted while it is locked: who waits for it sees that it is no longer in place.
    if lock.is_in_place():
        lock.path.unlink()
    lock.unlock()
    lock.close()


def _make_folder(folder: Path, made: ExitStack) -> None:
    """Make a folder and those above it; those that stay empty are deleted again."""
    absent = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error("Cannot make the folder", folder, error) from error
    for each in reversed(absent):
        made.callback(_delete_if_empty, each)


def _delete_if_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()
