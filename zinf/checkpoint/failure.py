"""Errors about the files of a checkpoint, each with advice."""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from zinf.checkpoint.place import Place
from zinf.core.memory.storage_error import StorageError

# Advice per error number. OSError itself appends the name of the file.
ADVICE = {
    errno.ENOSPC: "Free space on that drive, keep fewer checkpoints "
    "(run.keep_checkpoints), or save to another folder (run.output)",
    errno.EDQUOT: "Raise the quota, keep fewer checkpoints (run.keep_checkpoints), or "
    "save to another folder (run.output)",
    errno.EFBIG: "Raise the limit of the size of files, or save to another folder "
    "(run.output)",
    errno.EACCES: "Give this user the right to read and write there, or name another "
    "folder (run.output)",
    errno.EROFS: "Name a folder that can be written (run.output)",
    errno.ENOENT: "Something deleted it, or a folder above it. Use another checkpoint, "
    "or make the folder of checkpoints anew",
    errno.ENOTDIR: "A file is in the place of a folder. Move the file away, or save to "
    "another folder (run.output)",
    errno.ENAMETOOLONG: "Shorten the name, or save to another folder (run.output)",
    errno.EIO: "The checkpoint is damaged. Use another one, and check the drive",
}
OTHER_ADVICE = "Check the drive, and that nothing else writes in that folder"


def failure(what: str, folder: Path, error: OSError) -> StorageError:
    """A StorageError with advice for an OSError that was raised about `folder`."""
    code, path = error.errno or errno.EIO, Path(error.filename or folder)
    return explain(what, code, path, os.strerror(code))


def explain(what: str, code: int, path: Place, found: str) -> StorageError:
    """A StorageError that says what was tried, what was found and what to change."""
    advice = ADVICE.get(code, OTHER_ADVICE)
    return StorageError(code, f"{what}: {found}. {advice}", str(path))


@contextmanager
def explained(what: str, folder: Path) -> Generator[None, None, None]:
    """Turns an OSError into a StorageError that says what to do about a checkpoint."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise failure(what, folder, error) from error
