"""The folder in which zinf keeps, for each user, what costs time to find out again."""

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


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


@cache
def own_digest() -> str:
    """A digest of zinf's own files: its version does not say what changed since."""
    digest = hashlib.sha256()
    for path in own_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def own_files() -> list[Path]:
    """The modules of zinf and of its kernels, in order."""
    package = Path(__file__).parents[2]
    folders = package, package.with_name("zinf_kernels")
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def recall(file: Path) -> Any:
    """The content that `remember` wrote; None if missing, damaged or another kind."""
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        content, digest = written["content"], written["sha256"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return content if digest == _digest(content) else None


def remember(file: Path, content: Any) -> None:
    """Write JSON to a file that is there whole or not at all.

    It is done without if that fails.
    """
    fresh: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, delete=False
        ) as stream:
            fresh = Path(stream.name)
            json.dump({"sha256": _digest(content), "content": content}, stream)
        fresh.replace(file)
    except OSError as error:
        logger.info("%s is not written: %s", file, error)
        if fresh is not None:
            fresh.unlink(missing_ok=True)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


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
