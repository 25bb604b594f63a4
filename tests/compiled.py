"""Where compiled programs are kept between sessions of the tests."""

import hashlib
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

# An entry that nobody wrote anew for so long is deleted, and compiled again if wanted.
KEPT_SECONDS = 14 * 24 * 3600
MAX_BYTES = 4 << 30


def compile_cache() -> Path:
    """The folder of compiled programs for this jaxlib and processor, made if absent.

    jax's key has the program, the versions, the flags and the devices, so an entry that
    an older tree left is the same program. It has no features of the processor.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"jaxlib-{version('jaxlib')}-{processor()}"
    folder = root / "zinf-tests" / name
    folder.mkdir(parents=True, exist_ok=True)
    prune(folder)
    return folder


def processor() -> str:
    """A short name of this processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.machine(), platform.processor()]
    names = ("model name", "flags", "Features", platform.machine())
    described = sorted({line for line in lines if line.startswith(names)})
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]


def prune(folder: Path) -> None:
    """Delete entries that are old, and the oldest if all take more than `MAX_BYTES`."""
    oldest = time.time() - KEPT_SECONDS
    kept_bytes = 0
    entries = [(entry.stat(), Path(entry)) for entry in os.scandir(folder)]
    for stat, path in sorted(entries, key=lambda x: x[0].st_mtime, reverse=True):
        kept_bytes += stat.st_size
        if stat.st_mtime < oldest or kept_bytes > MAX_BYTES:
            path.unlink(missing_ok=True)
