"""Where compiled programs are kept between sessions of the tests."""

import os
from importlib.metadata import version
from pathlib import Path

from zinf.user_cache import processor, prune

# An entry that nobody wrote anew for so long is deleted, and compiled again if wanted.
KEPT_SECONDS = 14 * 24 * 3600.0
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
    prune(folder, max_bytes=MAX_BYTES, max_seconds=KEPT_SECONDS)
    return folder
