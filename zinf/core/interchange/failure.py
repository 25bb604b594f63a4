"""Errors about files of other formats, each with advice."""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from zinf.core.memory import StorageError

ADVICE = {
    errno.ENOSPC: "Free space on that drive, or name another folder",
    errno.EDQUOT: "Raise the quota, or name another folder",
    errno.EACCES: "Give this user the right to read and write there",
    errno.EROFS: "Name a folder that can be written",
    errno.ENOENT: "Name a file or folder that exists",
    errno.EIO: "The file is damaged, or was cut short: get it again",
}
OTHER_ADVICE = "Check the drive, and that nothing else writes in that folder"


def explain(what: str, code: int, path: Path, found: str) -> StorageError:
    """A StorageError that says what was tried, what was found and what to change."""
    return StorageError(
        code, f"{what}: {found}. {ADVICE.get(code, OTHER_ADVICE)}", str(path)
    )


@contextmanager
def explained(what: str, path: Path) -> Generator[None, None, None]:
    """Turns an OSError into a StorageError that names the file and what to do."""
    try:
        yield
    except OSError as error:
        code = error.errno or errno.EIO
        file = Path(error.filename or path)
        raise explain(what, code, file, os.strerror(code)) from error
