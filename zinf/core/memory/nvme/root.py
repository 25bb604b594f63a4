"""A folder of the NVMe tier: who owns it, and where its arrays are."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from zinf.core.memory.nvme.lock import LOCK, FolderLock
from zinf.core.memory.nvme.profile import PROFILE
from zinf.core.memory.nvme.system import write_new
from zinf.core.memory.storage_error import StorageError, from_os_error
from zinf.core.text.json_text import from_json

MARKER = "zinf.json"
INDEX = "zinf.index.jsonl"
ARRAYS = "arrays"
# A folder below, for an engine that runs beside the one that has this folder.
INNER = "zinf.inner"
NEW = {f"{MARKER}.new", f"{INDEX}.new", f"{PROFILE}.new"}
OURS = {MARKER, LOCK, INDEX, PROFILE, INNER, *NEW}
# Prefix of temporary files and folders. Leftovers are deleted when a root is opened.
PROBE = ".zinf-"
# Names in `arrays`, and in the folder of an array there: metadata and chunks, and what
# a write that was cut short leaves of them.
NUMBER = re.compile(r"[0-9]{6,}")
IN_ARRAY = re.compile(r"(zarr\.json|c)(\.|$)")
FORMAT = 2
ABOUT = {
    "about": "Arrays swapped out by zinf, in folders with short names that "
    f"{INDEX} explains; deleted when zinf next opens this folder.",
    "format": FORMAT,
}


class Root:
    """One folder of the tier, locked for one engine from construction to `close`.

    A marker file says that the folder `arrays` in it is ours. `arrays` is deleted when
    the root is next opened, since arrays that an earlier run offloaded are of no use to
    a new one. A folder that holds other files and no marker is refused, and so is one
    with anything in `arrays` that is no array of the tier, such as a checkpoint.

    Raises:
        StorageError: it is in use (the message says by whom), foreign, or cannot be
            read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.arrays = self.path / ARRAYS
        make_folder(self.path)
        self._refuse_foreign()
        self._lock = FolderLock(self.path)
        try:
            self._claim()
            self._refuse_foreign_arrays()
            self.wipe()
        except BaseException:
            self._lock.release()
            raise

    def wipe(self) -> None:
        """Delete all arrays and leftovers."""
        try:
            if self.arrays.exists():
                shutil.rmtree(self.arrays)
            self.arrays.mkdir(mode=0o700)
            for leftover in self.path.glob(f"{PROBE}*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()
        except OSError as error:
            raise from_os_error("Cannot delete old arrays", self.path, error) from error

    def close(self) -> None:
        self._lock.release()

    def _refuse_foreign(self) -> None:
        try:
            found = set(os.listdir(self.path))
        except OSError as error:
            raise from_os_error("Cannot read the folder", self.path, error) from error
        if MARKER in found:
            return
        names = {n for n in found - OURS if not n.startswith(PROBE)}
        if names:
            raise StorageError(
                errno.ENOTEMPTY,
                f"The NVMe folder holds {len(names)} files or folders that zinf did "
                f"not make (such as {min(names)!r}). Name an empty or a new folder in "
                "memory.nvme",
                str(self.path),
            )

    def _refuse_foreign_arrays(self) -> None:
        """Raise if `wipe` would delete what the tier cannot have made."""
        try:
            foreign = next(_foreign_in(self.arrays), None)
        except OSError as error:
            raise from_os_error("Cannot read old arrays", self.path, error) from error
        if foreign is not None:
            raise StorageError(
                errno.ENOTEMPTY,
                "The next engine deletes the arrays of an NVMe folder, and there is "
                "something else among them, which is kept. Move it away, or name "
                "another folder in memory.nvme",
                str(foreign),
            )

    def _claim(self) -> None:
        """Write the marker, or check that the one in the folder is ours."""
        marker = self.path / MARKER
        if marker.exists():
            _check_marker(marker)
            return
        try:
            write_new(marker, json.dumps(ABOUT, indent=2) + "\n")
        except OSError as error:
            raise from_os_error("Cannot mark the folder", marker, error) from error


def _foreign_in(arrays: Path) -> Iterator[Path]:
    """Yield paths in the folder `arrays` that the tier did not make.

    The folder of an array has a number as its name, files with the metadata and chunks
    of a zarr array, links to chunks on other drives, and no folders.
    """
    if not arrays.is_dir():
        return
    for folder in arrays.iterdir():
        if not NUMBER.fullmatch(folder.name) or folder.is_file():
            yield folder
        elif folder.is_dir() and not folder.is_symlink():
            for path in folder.iterdir():
                is_folder = path.is_dir() and not path.is_symlink()
                if is_folder or not IN_ARRAY.match(path.name):
                    yield path


def _check_marker(marker: Path) -> None:
    # The arrays beside a valid marker are about to be deleted.
    try:
        found = from_json(marker.read_text("utf-8"))["format"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StorageError(
            errno.EINVAL,
            "The file that marks an NVMe folder of zinf is damaged. Delete the folder "
            "if nothing in it is yours, or name another in memory.nvme",
            str(marker),
        ) from error
    if found != FORMAT:
        raise StorageError(
            errno.EINVAL,
            f"The NVMe folder has format {found}, of another version of zinf; this one "
            f"has format {FORMAT}. Delete the folder, or name another in memory.nvme",
            str(marker),
        )


def make_folder(path: Path) -> None:
    """Make the folder `path`, and those above it, unless it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise StorageError(
            errno.ENOTDIR,
            "The NVMe path, or one above it, is a file. Name a folder in memory.nvme",
            str(path),
        ) from error
    except OSError as error:
        raise from_os_error("Cannot make the NVMe folder", path, error) from error
