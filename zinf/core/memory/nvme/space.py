"""Checks the free bytes of the NVMe tier's drives before anything is written."""

import errno
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zinf.core.memory.storage_error import StorageError, from_os_error


def check_space(folders: Sequence[Path], needed_bytes: int) -> None:
    """Raise StorageError unless `needed_bytes` more fit on the drives of `folders`.

    Folders on one file system share its free bytes.
    """
    free_bytes: dict[int, int] = {}
    for folder in folders:
        _check_writable(folder)
        free_bytes[folder.stat().st_dev] = shutil.disk_usage(folder).free
    total_bytes = sum(free_bytes.values())
    if total_bytes < needed_bytes:
        where = "on this drive, which has" if len(free_bytes) == 1 else "on drives with"
        raise StorageError(
            errno.ENOSPC,
            f"The NVMe tier needs {needed_bytes:,} bytes {where} {total_bytes:,} "
            f"free: {needed_bytes - total_bytes:,} too few. Free space there, add a "
            "folder on another drive to memory.nvme, or keep fewer bytes on the NVMe "
            "tier",
            ", ".join(map(str, folders)),
        )


def _check_writable(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"zinf")
            probe.flush()
    except OSError as error:
        raise from_os_error("Cannot write to the NVMe folder", folder, error) from error
