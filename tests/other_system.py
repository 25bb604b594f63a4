"""Another operating system, as far as Linux can pretend to be one.

`pretend("darwin")` or `pretend("win32")` is called before zinf is imported. Modules of
zinf and zinf_kernels then see `os`, `mmap`, `fcntl` and others without the names that
Python does not have there. Other packages see the real modules: they have code of their
own for those systems, which Linux cannot run. Python opens no file of `/proc`. On
"win32" files follow three rules of Windows: what is open, or has an open file in it, is
not renamed or deleted; a rename replaces nothing; no folder is opened to be synced, and
no file that may only be read.

What this shows: no module needs a name that is not there, at import or in what a test
runs, and what zinf does in its place works.

What it cannot show: that jax, TensorStore, Orbax and numba work there; how drives and
file systems there behave beyond those rules; `F_FULLFSYNC`, for which `fsync` stands
in, and `GlobalMemoryStatusEx`, for which a constant does; paths with a drive letter and
backslashes, names that Windows reserves, and names that differ in case only.
"""

import builtins
import ctypes
import errno
import fcntl
import io
import mmap
import os
import platform
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = ("zinf", "zinf_kernels")
HIDDEN = "/proc"
# What `os.open` takes for binary files on Windows; Linux does not look at that bit.
O_BINARY = 0x8000
F_FULLFSYNC = 51

# Names that zinf could need while it runs. A type checker knows all others by typeshed:
# tests/test_platforms.py asks one. macOS has preadv from version 11 on: this is older.
LINUX_ONLY = {
    "os": "O_DIRECT O_NOATIME O_TMPFILE RWF_* preadv pwritev posix_fallocate "
    "posix_fadvise POSIX_FADV_* fdatasync sched_get* sched_set* memfd_create eventfd* "
    "splice copy_file_range *xattr pidfd_open pipe2",
    "mmap": "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTDUMP MADV_DONTFORK MADV_REMOVE "
    "MAP_POPULATE MAP_NORESERVE MAP_STACK",
    "signal": "SIGPWR SIGRT* SIGPOLL sigtimedwait sigwaitinfo",
    "socket": "AF_NETLINK AF_VSOCK SO_PEERCRED SOCK_CLOEXEC TCP_USER_TIMEOUT",
    "fcntl": "F_*PIPE_SZ F_OFD_* F_*LEASE",
    "select": "epoll EPOLL*",
}
UNIX_ONLY = {
    "os": "pread pwrite readv writev posix_* POSIX_* sync O_DIRECTORY O_CLOEXEC "
    "O_NOFOLLOW O_NONBLOCK O_SYNC O_DSYNC O_ACCMODE sysconf* pathconf* fork* "
    "register_at_fork get[egsu]*id getpg* set*id statvfs fstatvfs *chown fchmod fchdir "
    "uname nice killpg sched_* mkfifo sendfile getloadavg getpriority lockf "
    "wait wait3 wait4 waitid W[A-Z]* get_blocking set_blocking",
    "mmap": "MADV_* MAP_* PROT_*",
    "signal": "SIGHUP SIGKILL SIGQUIT SIGUSR* SIGCHLD SIGCONT SIGSTOP SIGPIPE SIGALRM "
    "SIGBUS SIG_BLOCK SIG_UNBLOCK SIG_SETMASK pthread_* sig[!n]* setitimer alarm pause",
    "socket": "AF_UNIX SO_REUSEPORT MSG_DONTWAIT MSG_NOSIGNAL send_fds recv_fds",
    "select": "poll POLL* PIPE_BUF",
}


class Pretence(ModuleType):
    """A module without some of its names, and with others in place of some."""

    def __init__(self, real: ModuleType, absent: str, **others: object) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(others)
        self.__dict__["_real"] = real
        self.__dict__["_absent"] = absent.split()

    def __getattr__(self, name: str) -> Any:
        if any(fnmatchcase(name, pattern) for pattern in self._absent):
            raise AttributeError(f"{self.__name__} has no {name} on that system")
        return getattr(self._real, name)


def pretend(system: str) -> list[str]:
    """From now on this process is on `system`: "darwin" or "win32".

    Returns:
        paths that are synced with `F_FULLFSYNC`, as they are.
    """
    assert not any(name in sys.modules for name in OURS), "zinf is imported already"
    synced: list[str] = []
    modules = {name: Pretence(import_module(name), x) for name, x in LINUX_ONLY.items()}
    modules["sys"] = Pretence(sys, "", platform=system)
    name = {"darwin": "Darwin", "win32": "Windows"}[system]
    other = {"system": lambda: name, "libc_ver": lambda: ("", "")}
    modules["platform"] = Pretence(platform, "", **other)
    if system == "darwin":

        def full_fsync(descriptor: int, command: int, argument: int = 0) -> int:
            if command != F_FULLFSYNC:
                return fcntl.fcntl(descriptor, command, argument)
            synced.append(_path_of(descriptor))
            os.fsync(descriptor)
            return 0

        modules["fcntl"].__dict__.update(fcntl=full_fsync, F_FULLFSYNC=F_FULLFSYNC)
        modules["ctypes"] = Pretence(ctypes, "", CDLL=_no_glibc)
    else:
        for name, absent in UNIX_ONLY.items():
            modules[name]._absent += absent.split()
        del modules["fcntl"]
        modules["os"].__dict__.update(
            O_BINARY=O_BINARY, name="nt", open=_open_file, fsync=_sync
        )
        modules["mmap"].__dict__["mmap"] = _WindowsMap
        windll = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=_memory))
        modules["ctypes"] = Pretence(ctypes, "PyDLL", CDLL=_no_glibc, windll=windll)
        os.rename = _unless_there(os.rename)
        for name in ("rename", "replace", "unlink", "remove", "rmdir"):
            setattr(os, name, _unless_open(getattr(os, name)))
    _show(modules, ("fcntl", "resource", "termios", "pwd", "grp", "pty"), system)
    _hide_proc()
    return synced


def _show(modules: dict[str, Pretence], unix: tuple[str, ...], system: str) -> None:
    """Has our modules import what is in `modules`, and no Unix module on Windows."""
    real = builtins.__import__

    def pretended(name: str, scope: Any = None, *rest: Any, **named: Any) -> Any:
        if (scope or {}).get("__name__", "").partition(".")[0] in OURS:
            if name in modules:
                return modules[name]
            if system == "win32" and name in unix:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, scope, *rest, **named)

    builtins.__import__ = pretended


def _hide_proc() -> None:
    """No file of the kernel's can be opened by its path, by anybody in Python."""
    real = io.open

    def opened(path: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(path, int) and os.fspath(path).startswith(HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path, *rest, **named)

    io.open = builtins.open = opened


def _no_glibc(name: object, *_: object, **__: object) -> Any:
    raise AssertionError(f"CDLL({name}) takes glibc for granted")


class _WindowsMap(mmap.mmap):
    """Memory as Windows maps it: no flags, and no advice about it."""

    def __new__(cls, fileno: int, length: int, tagname: None = None) -> "_WindowsMap":
        return super().__new__(cls, fileno, length)

    madvise = property()  # type: ignore[assignment]


def _memory(status: Any) -> bool:
    status._obj.total_physical = 2**33
    return status._obj.length == ctypes.sizeof(status._obj) == 64


def _open_file(path: Any, flags: int, mode: int = 0o777) -> int:
    """Windows opens no folder as a file."""
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return os.open(path, flags, mode)


def _sync(descriptor: int) -> None:
    """`_commit` of the C library, which wants a file that may be written."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    os.fsync(descriptor)


def _unless_there(rename: Callable[..., None]) -> Callable[..., None]:
    """Windows renames nothing over what is there, unless it is told to replace."""

    def checked(source: Any, target: Any, **named: Any) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        rename(source, target, **named)

    return checked


def _unless_open(function: Callable[..., None]) -> Callable[..., None]:
    """Windows renames and deletes nothing that is open, nor a folder above it."""

    def checked(path: Any, *rest: Any, **named: Any) -> None:
        if named.get("dir_fd") is None and not isinstance(path, int):
            for each in (path, *rest):
                _refuse_open(os.path.realpath(each))
        function(path, *rest, **named)

    return checked


def _refuse_open(path: str) -> None:
    for number in os.listdir("/proc/self/fd"):
        found = _path_of(int(number))
        if found == path or found.startswith(f"{path}/"):
            if os.path.isdir(found):
                continue  # Linux lists and deletes folders by opening them.
            raise PermissionError(errno.EACCES, "it is open", path)


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""
