"""The secret of a run on one host, in a file that process 0 writes for the others."""

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from zinf.distributed.seat import JoinError
from zinf.distributed.secret import Secret

SECRET_BYTES = 32
REMEDY = (
    "Set ZINF_SECRET to the same text for all processes, or ZINF_SECRET_FILE to a file "
    "that all can read."
)


def make_file(port: int) -> tuple[Secret, Path]:
    """Writes a new secret to a file that only this user can read.

    Only process 0 may call this, after it has bound the port: the file replaces that
    of an earlier run on the same port.

    Raises:
        JoinError: The file cannot be written, or another user can change its folder.
    """
    path = _file(port)
    text = secrets.token_hex(SECRET_BYTES)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_owner(path.parent)
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        raise JoinError(
            f"The secret of the run cannot be written to {path}: {error.strerror}. "
            f"{REMEDY}"
        ) from error
    return Secret(text.encode(), f"the file {path}"), path


def read_file(port: int) -> Secret:
    """The secret that process 0 wrote on this host.

    Raises:
        JoinError: The file cannot be read, or another user can change its folder.
    """
    path = _file(port)
    try:
        _check_owner(path.parent)
        text = path.read_text("utf-8")
    except OSError as error:
        raise JoinError(
            f"All processes of this run are on one host, so process 0 wrote their "
            f"secret to {path}, which cannot be read here: {error.strerror}. {REMEDY}"
        ) from error
    return Secret(text.encode(), f"the file {path}")


def remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _file(port: int) -> Path:
    # Windows has no user numbers, but each user has a temporary folder of their own.
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"zinf-{user}" / f"secret-{port}"


def _check_owner(folder: Path) -> None:
    """Refuse a folder that another user made or can write to: anybody can use /tmp."""
    found = os.lstat(folder)
    if not hasattr(os, "getuid"):
        return
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or is_open:
        raise JoinError(
            f"{folder} holds the secrets of this user's runs, but another user made it "
            f"or can write to it. Remove it. {REMEDY}"
        )
