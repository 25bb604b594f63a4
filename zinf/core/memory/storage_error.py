"""Errors of files: what was asked, what was found and what to change."""

import errno
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OTHER_ADVICE = "Check the drive, and that nothing else writes in that folder"

# Parts of TensorStore's messages: error number of the system, copy of the spec, file.
OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
SPEC = re.compile(r" \[tensorstore_spec=.*", re.DOTALL)
FILE = re.compile(r'local file "([^"]+)"')


class StorageError(OSError):
    """A file of the NVMe tier could not be read or written as asked.

    `errno` is the system's error number if it gave one, else the nearest; `filename` is
    the chunk file, or the folder of the array.
    """


@dataclass(frozen=True)
class Advice:
    """Errors about files of one kind, each with what to do about it.

    Attributes:
        table: the advice by error number. (OSError itself appends the file.)
    """

    table: Mapping[int, str]

    def error(self, what: str, code: int, path: Any, found: str) -> StorageError:
        """A StorageError that says what was asked, what was found and what to do."""
        advice = self.table.get(code, OTHER_ADVICE)
        return StorageError(code, f"{what}: {found}. {advice}", str(path))

    def from_os_error(
        self, what: str, path: Any, error: OSError, *, place: str = ""
    ) -> StorageError:
        """A StorageError for an error of the system, at `place` in the file."""
        is_late = isinstance(error, TimeoutError)
        code = error.errno or (errno.ETIMEDOUT if is_late else errno.EIO)
        found = os.strerror(code)
        return self.error(what, code, path, f"{found}, {place}" if place else found)

    def failure(self, what: str, path: Any, error: OSError) -> StorageError:
        """A StorageError about the file that an error names, or else about `path`."""
        return self.from_os_error(what, error.filename or path, error)

    @contextmanager
    def explained(self, what: str, path: Any) -> Generator[None, None, None]:
        """Turns an OSError into a StorageError."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise self.failure(what, path, error) from error


FULL = (
    "Free space on that drive, add a folder on another drive to memory.nvme, or keep "
    "fewer bytes on the NVMe tier"
)
DENIED = (
    "Give this user the right to read and write there, or name another folder in "
    "memory.nvme"
)
NVME_TIER = Advice(
    {
        errno.ENOSPC: FULL,
        errno.EDQUOT: FULL,
        errno.EFBIG: FULL,
        errno.EACCES: DENIED,
        errno.EPERM: DENIED,
        errno.EROFS: DENIED,
        errno.ENOENT: "Something deleted files of the running job. Find out what, and "
        "resume from the last checkpoint in a new process",
        errno.ENODATA: "Write the array before you read it. If it was written, "
        "something shortened its file: resume from the last checkpoint",
        errno.ETIMEDOUT: "Check the drive and its cable, bus or network. If it is only "
        "slow, raise memory.stall_seconds. Then resume from the last checkpoint",
        errno.EMFILE: "Raise the limit of open files (ulimit -n), or close some",
        errno.EIO: "The file is damaged. Check the drive (and what else writes there), "
        "and resume from the last checkpoint",
    }
)
CHECKPOINT = Advice(
    {
        errno.ENOSPC: "Free space on that drive, keep fewer checkpoints "
        "(run.keep_checkpoints), or save to another folder (run.output)",
        errno.EDQUOT: "Raise the quota, keep fewer checkpoints (run.keep_checkpoints), "
        "or save to another folder (run.output)",
        errno.EFBIG: "Raise the limit of the size of files, or save to another folder "
        "(run.output)",
        errno.EACCES: "Give this user the right to read and write there, or name "
        "another folder (run.output)",
        errno.EROFS: "Name a folder that can be written (run.output)",
        errno.ENOENT: "Something deleted it, or a folder above it. Use another "
        "checkpoint, or make the folder of checkpoints anew",
        errno.ENOTDIR: "A file is in the place of a folder. Move the file away, or "
        "save to another folder (run.output)",
        errno.ENAMETOOLONG: "Shorten the name, or save to another folder (run.output)",
        errno.EIO: "The checkpoint is damaged. Use another one, and check the drive",
    }
)
# Files of other formats.
INTERCHANGE = Advice(
    {
        errno.ENOSPC: "Free space on that drive, or name another folder",
        errno.EDQUOT: "Raise the quota, or name another folder",
        errno.EACCES: "Give this user the right to read and write there",
        errno.EROFS: "Name a folder that can be written",
        errno.ENOENT: "Name a file or folder that exists",
        errno.EIO: "The file is damaged, or was cut short: get it again",
    }
)
storage_error = NVME_TIER.error
from_os_error = NVME_TIER.from_os_error


def from_tensorstore(what: str, folder: Path, error: Exception) -> StorageError:
    """Translate an error of TensorStore, which raises ValueError for nearly everything.

    Its messages begin with a status ("NOT_FOUND: ...") and end with the system's error
    number, if there is one.
    """
    message = SPEC.sub("", str(error))
    number, file = OS_ERROR.search(message), FILE.search(message)
    if number:
        code = int(number.group(1))
    elif message.startswith("NOT_FOUND"):
        code = errno.ENOENT
    else:
        code = errno.EIO if "Error reading" in message else errno.EINVAL
    path = file.group(1) if file else folder
    return storage_error(what, code, path, message.rstrip("."))
