"""The system calls that the tier makes, in one place.

So tests can make any call fail, and no other code for files depends on the system:

|                       | Linux             | macOS             | Windows            |
|-----------------------|-------------------|-------------------|--------------------|
| past the page cache   | `O_DIRECT`        | no                | no                 |
| a range of a file     | `preadv`          | `preadv`, or seek | seek               |
| room on the drive     | `posix_fallocate` | length only       | length only        |
| content is safe after | `fdatasync`       | `F_FULLFSYNC`     | `fsync`            |
| names are safe after  | `fsync` of folder | `F_FULLFSYNC`     | as the system does |
| lock on a folder      | `flock`           | `flock`           | no NVMe tier       |

"Length only": a full drive shows when content is written, not when a file is made.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

OPENAT2 = 437  # The number of the call on every architecture.
AT_FDCWD = -100
RESOLVE_CACHED = 0x20

# Flags of `System.open` and `System.preadv`; 0 where the system has no such thing.
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
# Without it Windows writes a line feed as two characters.
O_BINARY: int = getattr(os, "O_BINARY", 0)


class OpenHow(ctypes.Structure):
    """`struct open_how` of openat2(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def open_cached(path: Path, flags: int) -> int:
    """Open a file if the kernel can do so without a drive (Linux 5.12).

    Raises:
        OSError: EAGAIN if it cannot, ENOSYS if the system has no such call, and any
            error of `os.open`.
    """
    code = errno.ENOSYS
    if sys.platform == "linux":
        # The owner of a file alone may leave its time of access as it is.
        for more in (os.O_NOATIME, 0):
            found = _openat2(
                path, OpenHow(flags | os.O_CLOEXEC | more, 0, RESOLVE_CACHED)
            )
            if found >= 0:
                return found
            code = ctypes.get_errno()
            if code != errno.EPERM:
                break
    raise OSError(code, os.strerror(code), str(path))


if sys.platform == "linux":

    def _openat2(path: Path, how: OpenHow) -> int:
        return _libc.syscall(
            ctypes.c_long(OPENAT2),
            ctypes.c_long(AT_FDCWD),
            os.fsencode(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )

    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.syscall.restype = ctypes.c_long


def read_at(descriptor: int, memory: Sequence[Any], offset: int) -> int:
    """`os.preadv` of one buffer, for a descriptor that no other thread uses."""
    with FileIO(descriptor, "rb", closefd=False) as file:
        file.seek(offset)
        return file.readinto(memory[0]) or 0


def write_at(descriptor: int, memory: Sequence[Any], offset: int) -> int:
    """`os.pwritev` of one buffer, for a descriptor that no other thread uses."""
    with FileIO(descriptor, "r+b", closefd=False) as file:
        file.seek(offset)
        return file.write(memory[0]) or 0


def allocate(descriptor: int, offset: int, nbytes: int) -> None:
    """Make a file `offset + nbytes` long at least, reserved on the drive on Linux."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, offset, nbytes)
    elif os.fstat(descriptor).st_size < offset + nbytes:
        os.ftruncate(descriptor, offset + nbytes)


def toggle_direct(descriptor: int) -> None:
    """Switch a descriptor from the page cache to O_DIRECT, or back."""
    assert O_DIRECT, "without it no file moves past the page cache"
    if sys.platform != "win32":
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ O_DIRECT)


def sync(descriptor: int) -> None:
    """Wait until content and length of a file survive a power cut."""
    if sys.platform == "darwin":
        # On macOS fsync(2) only hands the content to the drive, which may keep it in a
        # cache and write it in another order.
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            # Network and some external drives refuse with undocumented errors; then
            # fsync is used. These three errors mean a lost write. They are raised,
            # because fsync could succeed after one.
            if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise
    os.fsync(descriptor)


def sync_content(descriptor: int) -> None:
    """`sync` without the times of the file, where the system can leave them out."""
    if sys.platform == "linux":
        os.fdatasync(descriptor)
    else:
        sync(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of a file survive a power cut."""
    # Windows syncs only files opened for writing; elsewhere a file may be read-only.
    _sync_path(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Make new and renamed entries of `folder` survive a power cut.

    Windows cannot open a folder to sync it. NTFS has a journal for entries: after a
    power cut the last ones may be missing, but those that are there are whole.
    """
    if sys.platform != "win32":
        _sync_path(folder, os.O_RDONLY | os.O_DIRECTORY)


def write_new(path: Path, text: str) -> None:
    """Write a private file through `PATH.new`, which replaces `path` when complete.

    What is at `PATH.new`, such as a symbolic link, is replaced and not written to.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def _sync_path(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock a file; false if another process, or another descriptor, has the lock."""
    check_has_tier()
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def unlock(descriptor: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def check_has_tier() -> None:
    """Raise NotImplementedError on Windows, which has no NVMe tier."""
    if sys.platform == "win32":
        raise NotImplementedError(
            "The NVMe tier needs Linux or macOS, and this is Windows: take memory.nvme "
            "and every `device: nvme` out of the config; the host tier works here."
        )


@dataclass(frozen=True)
class System:
    """The system calls that the tier makes; each raises OSError as `os` does."""

    open: Callable[..., int] = os.open
    open_cached: Callable[[Path, int], int] = open_cached
    close: Callable[[int], None] = os.close
    preadv: Callable[..., int] = getattr(os, "preadv", read_at)
    pwritev: Callable[..., int] = getattr(os, "pwritev", write_at)
    allocate: Callable[[int, int, int], None] = allocate
    stat: Callable[[int], os.stat_result] = os.fstat
    toggle_direct: Callable[[int], None] = toggle_direct
    sync: Callable[[int], None] = sync_content
    replace: Callable[..., Any] = os.replace
    unlink: Callable[..., None] = os.unlink
