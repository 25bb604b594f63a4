"""The folder in which zinf keeps, for each user, what costs time to find out again."""

import hashlib
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path


def user_cache() -> Path:
    """zinf's folder among the user's caches; it may not exist yet.

    Raises:
        RuntimeError: the user has no home folder.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "zinf"


def processor() -> str:
    """A short name of this processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.machine(), platform.processor()]
    names = ("model name", "flags", "Features", platform.machine())
    described = sorted({line for line in lines if line.startswith(names)})
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]


def programs_name() -> str:
    """The name of a folder for programs of this jaxlib for this processor.

    jax's key of a program has the versions, the flags and the devices, and not the
    features of the processor.
    """
    return f"jaxlib-{version('jaxlib')}-{processor()}"


def prune(folder: Path, *, max_bytes: int, max_seconds: float) -> None:
    """Delete the files that nobody used for long, or for longest beyond `max_bytes`.

    Folders in it are left alone, and so is what another process deletes meanwhile.

    Raises:
        OSError: the folder cannot be read.
    """
    kept_bytes, oldest = 0, time.time() - max_seconds
    found = []
    for entry in os.scandir(folder):
        try:
            stat = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if entry.is_file(follow_symlinks=False):
            # Drives are often mounted so that reading sets atime once a day.
            found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path))
    for used, nbytes, path in sorted(found, reverse=True):
        kept_bytes += nbytes
        if used < oldest or kept_bytes > max_bytes:
            Path(path).unlink(missing_ok=True)
