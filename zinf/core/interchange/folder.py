"""Creates a folder that gets its name only when all files in it are written."""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from zinf.core.memory.nvme.system import sync_folder
from zinf.core.memory.storage_error import INTERCHANGE


@contextmanager
def complete_folder(directory: Path, needed_bytes: int) -> Generator[Path, None, None]:
    """A new folder to write in, renamed to `directory` if the `with` block succeeds.

    The body must sync the files that it writes. If the process is killed, the folder
    `.<name>.incomplete.<process>` is left beside `directory`, which has not changed.

    Raises:
        FileExistsError: `directory` is a file, or a folder that is not empty.
        StorageError: the folder cannot be made, or its drive has fewer than
            `needed_bytes` free.
    """
    what = f"Cannot write {directory}"
    check_target(directory, needed_bytes)
    fresh = directory.with_name(f".{directory.name}.incomplete.{os.getpid()}")
    with INTERCHANGE.explained(what, directory):
        fresh.mkdir()
    try:
        yield fresh
        with INTERCHANGE.explained(what, directory):
            sync_folder(fresh)
            if directory.is_dir():
                os.rmdir(directory)  # Some systems cannot rename over an empty folder.
            os.rename(fresh, directory)
            sync_folder(directory.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def check_target(directory: Path, needed_bytes: int) -> None:
    """Raise the errors of `complete_folder` before anything is written."""
    what = f"Cannot write {directory}"
    with INTERCHANGE.explained(what, directory):
        is_taken = os.path.lexists(directory) and not (
            directory.is_dir() and not any(directory.iterdir())
        )
        directory.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(directory.parent).free
    if is_taken:
        raise FileExistsError(
            f"{directory} is there already, and is not overwritten. Name another "
            "folder, or delete that one first."
        )
    if free_bytes < needed_bytes:
        found = f"it takes {needed_bytes:,} bytes and {free_bytes:,} are free"
        raise INTERCHANGE.error(what, errno.ENOSPC, directory, found)
