"""Where compiled programs are kept between sessions of the tests."""

from pathlib import Path

from zinf.core.process.user_cache import programs_name, prune, user_cache

# An entry that nobody wrote anew for so long is deleted, and compiled again if wanted.
KEPT_SECONDS = 14 * 24 * 3600.0
MAX_BYTES = 4 << 30


def compile_cache() -> Path:
    """The folder of compiled programs for this jaxlib and processor, made if absent.

    An entry that an older tree left is the same program.
    """
    folder = user_cache().with_name("zinf-tests") / programs_name()
    folder.mkdir(parents=True, exist_ok=True)
    prune(folder, max_bytes=MAX_BYTES, max_seconds=KEPT_SECONDS)
    return folder
