"""Whether the drives of the NVMe tier have room, asked before anything is written."""

import errno
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from zinf.memory.storage_error import StorageError, from_os_error


def check_space(
    folders: Sequence[Path], needed_bytes: int, *, spare_bytes: int
) -> None:
    """Raise StorageError unless `needed_bytes` more fit in `folders`, evenly dealt.

    Rewriting a chunk keeps the old file until the new one is complete: `spare_bytes`
    is what that can take on each drive, at most as much again as the arrays there.
    Folders on one file system share its free bytes.
    """
    drives: dict[int, list[Path]] = defaultdict(list)
    for folder in folders:
        _check_writable(folder)
        drives[folder.stat().st_dev].append(folder)
    for on_drive in drives.values():
        share_bytes = -(-needed_bytes * len(on_drive) // len(folders))
        asked_bytes = share_bytes + min(spare_bytes, share_bytes)
        free_bytes = shutil.disk_usage(on_drive[0]).free
        if free_bytes < asked_bytes:
            raise StorageError(
                errno.ENOSPC,
                f"The NVMe tier needs {asked_bytes:,} bytes on this drive, which has "
                f"{free_bytes:,} free: {asked_bytes - free_bytes:,} too few. Free "
                "space there, add a folder on another drive to memory.nvme, or keep "
                "fewer bytes on the NVMe tier",
                str(on_drive[0]),
            )


def _check_writable(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"zinf")
            probe.flush()
    except OSError as error:
        raise from_os_error("Cannot write to the NVMe folder", folder, error) from error
