"""The system calls of the tier, in one place, so that tests can make them fail."""

import ctypes
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPENAT2 = 437  # The number of the call on every architecture.
AT_FDCWD = -100
RESOLVE_CACHED = 0x20


class OpenHow(ctypes.Structure):
    """`struct open_how` of openat2(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def open_cached(path: Path, flags: int) -> int:
    """Open a file if the kernel can without asking a drive (Linux 5.12).

    Raises:
        OSError: EAGAIN if it cannot, ENOSYS where there is no such call, and what
            else `os.open` raises.
    """
    how = OpenHow(flags | os.O_CLOEXEC | os.O_NOATIME, 0, RESOLVE_CACHED)
    found = _libc.syscall(
        ctypes.c_long(OPENAT2),
        ctypes.c_long(AT_FDCWD),
        os.fsencode(path),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return found


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class System:
    """What the tier asks of the kernel; each call raises OSError as `os` does."""

    open: Callable[..., int] = os.open
    open_cached: Callable[[Path, int], int] = open_cached
    close: Callable[[int], None] = os.close
    preadv: Callable[..., int] = os.preadv
    pwritev: Callable[..., int] = os.pwritev
    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    stat: Callable[[int], os.stat_result] = os.fstat
    fcntl: Callable[..., Any] = fcntl.fcntl
    sync: Callable[[int], None] = os.fdatasync
    replace: Callable[..., Any] = os.replace
    unlink: Callable[..., None] = os.unlink
