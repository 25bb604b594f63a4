"""A folder of the NVMe tier: whose it is, and where in it each array lies."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO
from urllib.parse import quote

from zinf.memory.storage_error import StorageError, from_os_error
from zinf.program import ArrayId

MARKER = "zinf.json"
LOCK = "zinf.lock"
# "@" is escaped in names that come from the user, so what we append cannot clash.
PLAIN_CHARACTERS = "[](){}=+,:'! "
DOTS = {".", ".."}


class Root:
    """One folder of the tier, this process's alone from opening to `close`.

    A marker file names the role folders that we made in it. Those are deleted when the
    folder is next opened, since what an earlier run swapped out is of no use to a new
    one. A folder that holds anything else and no marker is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._roles: set[str] = set()
        make_folder(self.path)
        self._refuse_foreign()
        self._lock = _lock(self.path)
        try:
            self._roles = self._read_marker()
            self.wipe()
        except BaseException:
            self._lock.close()
            raise

    def folder(self, array: ArrayId) -> Path:
        """Where `array` lies: `role/key path`, with the microbatch or rows it is of."""
        role = _escape(array.role)
        if role not in self._roles:
            # Before anything is put there, so that a crash leaves no unknown folder.
            self._write_marker(self._roles | {role})
            self._roles.add(role)
        parts = [_escape(part) for part in array.path.split("/")]
        if array.rows is not None:
            parts[-1] += f"@rows={array.rows[0]}-{array.rows[1]}"
        if array.microbatch is not None:
            parts[-1] += f"@microbatch={array.microbatch}"
        return self.path.joinpath(role, *parts)

    def wipe(self) -> None:
        """Delete every role folder."""
        try:
            for role in self._roles:
                if (self.path / role).exists():
                    shutil.rmtree(self.path / role)
        except OSError as error:
            raise from_os_error("Cannot delete old arrays", self.path, error) from error
        self._write_marker(set())
        self._roles.clear()

    def close(self) -> None:
        self._lock.close()

    def _refuse_foreign(self) -> None:
        try:
            names = set(os.listdir(self.path)) - {LOCK, f"{MARKER}.new"}
        except OSError as error:
            raise from_os_error("Cannot read the folder", self.path, error) from error
        if names and MARKER not in names:
            raise StorageError(
                errno.ENOTEMPTY,
                f"The NVMe folder holds {len(names)} files or folders that zinf did "
                f"not make (such as {min(names)!r}). Name an empty or a new folder in "
                "memory.nvme",
                str(self.path),
            )

    def _read_marker(self) -> set[str]:
        marker = self.path / MARKER
        if not marker.exists():
            return set()
        try:
            roles = set(json.loads(marker.read_text())["roles"])
            # These are about to be deleted: none may lead out of this folder.
            if not all("/" not in role and role not in DOTS for role in roles):
                raise ValueError(f"{roles} are not names of folders")
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                errno.EINVAL,
                "The file that marks an NVMe folder of zinf is damaged. Delete the "
                "folder if nothing in it is yours, or name another in memory.nvme",
                str(marker),
            ) from error
        return roles

    def _write_marker(self, roles: set[str]) -> None:
        content = {
            "about": "Arrays swapped out by zinf; deleted when zinf next opens this "
            "folder.",
            "roles": sorted(roles),
        }
        marker = self.path / MARKER
        try:
            fresh = marker.with_name(f"{MARKER}.new")
            fresh.write_text(json.dumps(content, indent=2) + "\n")
            fresh.replace(marker)
        except OSError as error:
            raise from_os_error("Cannot mark the folder", marker, error) from error


def make_folder(path: Path) -> None:
    """Make the folder `path`, and those above it, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise StorageError(
            errno.ENOTDIR,
            "The NVMe path, or one above it, is a file. Name a folder in memory.nvme",
            str(path),
        ) from error
    except OSError as error:
        raise from_os_error("Cannot make the NVMe folder", path, error) from error


def _lock(path: Path) -> IO[str]:
    """Hold the lock file of the folder; closing the file lets go of it."""
    try:
        file = open(path / LOCK, "a+")
    except OSError as error:
        raise from_os_error("Cannot write to the folder", path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise StorageError(
            errno.EBUSY,
            f"The NVMe folder is in use by process {owner or 'unknown'}. Wait for it, "
            "end it, or name another folder in memory.nvme",
            str(path),
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _escape(name: str) -> str:
    """`name` as one component of a file path; different names stay different."""
    if not name:
        return "@"
    if name in DOTS or name in {"c", "zarr.json"} or name.startswith("c."):
        # It would lead elsewhere, or name the metadata or a chunk of an outer array.
        return f"%{ord(name[0]):02X}{name[1:]}"
    return quote(name, safe=PLAIN_CHARACTERS)
