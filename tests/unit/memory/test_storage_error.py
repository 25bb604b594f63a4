import errno
from pathlib import Path

import pytest

from zinf.memory.storage_error import StorageError, from_os_error, from_tensorstore

FOLDER = Path("/nvme/param/w")

# As TensorStore 0.1.86 words them, on a full tmpfs and for damaged chunks.
FULL = (
    'RESOURCE_EXHAUSTED: Error writing local file "/nvme/param/w/c.3.0": Failed '
    'writing: "/nvme/param/w/c.3.0.__lock": Failed to write 4096 bytes to file 4: No '
    "space left on device [os_error_code='28']"
)
MISSING = (
    'NOT_FOUND: chunk {0, 0} stored at local file "/nvme/param/w/c.0.0" is missing'
)
SHORT = (
    'FAILED_PRECONDITION: Error reading local file "/nvme/param/w/c.0.0": Not enough '
    "data: expected at least 128 or 118 more; at byte 10"
)
NOT_OPENED = (
    'NOT_FOUND: Error opening "zarr3" driver: Error writing local file '
    "\"/nvme/param/w/zarr.json\": Permission denied [os_error_code='13'] "
    "[tensorstore_spec='{\\\"context\\\":{}}']"
)


@pytest.mark.parametrize(
    ("message", "code", "file", "advice"),
    [
        (FULL, errno.ENOSPC, "c.3.0", "add a folder on another drive"),
        (MISSING, errno.ENOENT, "c.0.0", "Something deleted files"),
        (SHORT, errno.EIO, "c.0.0", "The file is damaged"),
        (NOT_OPENED, errno.EACCES, "zarr.json", "the right to read and write"),
    ],
)
def test_what_tensorstore_says_becomes_number_file_and_advice(
    message: str, code: int, file: str, advice: str
) -> None:
    error = from_tensorstore("Cannot write param/w", FOLDER, ValueError(message))
    assert isinstance(error, StorageError) and isinstance(error, OSError)
    assert error.errno == code
    assert error.filename == str(FOLDER / file)
    assert "Cannot write param/w" in str(error) and advice in str(error)
    assert "tensorstore_spec" not in str(error)


def test_without_a_file_in_the_message_the_folder_is_named() -> None:
    error = from_tensorstore("Cannot read w", FOLDER, ValueError("INTERNAL: what"))
    assert (error.errno, error.filename) == (errno.EINVAL, str(FOLDER))


def test_an_error_of_the_system_keeps_its_number() -> None:
    error = from_os_error("Cannot delete w", FOLDER, OSError(errno.EROFS, "whatever"))
    assert error.errno == errno.EROFS
    assert "Read-only file system" in str(error)
    assert "the right to read and write" in str(error)
