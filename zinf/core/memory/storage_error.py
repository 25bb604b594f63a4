"""Errors of files: what was asked, what was found and what to change."""

import errno
import os
import re
from pathlib import Path

# What to do about an error, by its number. (OSError itself appends the file.)
ADVICE = {
    errno.ENOSPC: "Free space on that drive, add a folder on another drive to "
    "memory.nvme, or keep fewer bytes on the NVMe tier",
    errno.EACCES: "Give this user the right to read and write there, or name another "
    "folder in memory.nvme",
    errno.ENOENT: "Something deleted files of the running job. Find out what, and "
    "resume from the last checkpoint in a new process",
    errno.ENODATA: "Write the array before you read it. If it was written, something "
    "shortened its file: resume from the last checkpoint",
    errno.ETIMEDOUT: "Check the drive and its cable, bus or network. If it is only "
    "slow, raise memory.stall_seconds. Then resume from the last checkpoint",
    errno.EMFILE: "Raise the limit of open files (ulimit -n), or close some",
    errno.EIO: "The file is damaged. Check the drive (and what else writes there), and "
    "resume from the last checkpoint",
}
OTHER_ADVICE = "Check the drive, and that nothing else writes in that folder"
SAME_ADVICE = {
    errno.EDQUOT: errno.ENOSPC,
    errno.EFBIG: errno.ENOSPC,
    errno.EPERM: errno.EACCES,
    errno.EROFS: errno.EACCES,
}

# Parts of TensorStore's messages: error number of the system, copy of the spec, file.
OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
SPEC = re.compile(r" \[tensorstore_spec=.*", re.DOTALL)
FILE = re.compile(r'local file "([^"]+)"')


class StorageError(OSError):
    """A file of the NVMe tier could not be read or written as asked.

    `errno` is the system's error number if it gave one, else the nearest; `filename` is
    the chunk file, or the folder of the array.
    """


def storage_error(what: str, code: int, path: Path | str, found: str) -> StorageError:
    """A StorageError that says what was asked, what was found and what to change."""
    advice = ADVICE.get(SAME_ADVICE.get(code, code), OTHER_ADVICE)
    return StorageError(code, f"{what}: {found}. {advice}", str(path))


def from_os_error(
    what: str, path: Path, error: OSError, *, place: str = ""
) -> StorageError:
    """A StorageError for an error of the system, at `place` in the file."""
    is_late = isinstance(error, TimeoutError)
    code = error.errno or (errno.ETIMEDOUT if is_late else errno.EIO)
    found = os.strerror(code)
    return storage_error(what, code, path, f"{found}, {place}" if place else found)


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
