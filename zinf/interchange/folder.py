"""A folder that is there when all in it is, and not before."""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from zinf.interchange.failure import explain, explained
from zinf.memory.nvme.system import sync_folder


@contextmanager
def complete_folder(directory: Path, needed_bytes: int) -> Generator[Path, None, None]:
    """A new folder to write in, which becomes `directory` if the body succeeds.

    What the body writes it must sync itself. A process that is killed leaves a folder
    `.<name>.incomplete.<process>` beside it, and never half an export.

    Raises:
        FileExistsError: `directory` holds something already.
        StorageError: it cannot be made, or has no room for `needed_bytes`.
    """
    what = f"Cannot write {directory}"
    check_target(directory, needed_bytes)
    fresh = directory.with_name(f".{directory.name}.incomplete.{os.getpid()}")
    with explained(what, directory):
        fresh.mkdir()
    try:
        yield fresh
        with explained(what, directory):
            sync_folder(fresh)
            if directory.is_dir():
                os.rmdir(directory)  # Not all systems rename over an empty folder.
            os.rename(fresh, directory)
            sync_folder(directory.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def check_target(directory: Path, needed_bytes: int) -> None:
    """Raise, as `complete_folder` does, unless a folder can be made and filled."""
    what = f"Cannot write {directory}"
    with explained(what, directory):
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
        raise explain(what, errno.ENOSPC, directory, found)
