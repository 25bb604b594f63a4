"""Folders to write a cache in, and the deletion of those that a killed process left."""

import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from zinf.core.memory.nvme.system import try_lock
from zinf.core.text.complaint import naming

SUFFIX = ".partial"
LOCK = "zinf.lock"
MARK = "zinf writes here: process "
RETRY_SECONDS = 0.01

logger = logging.getLogger(__name__)


@contextmanager
def unfinished(target: Path) -> Generator[Path, None, None]:
    """A new folder beside `target`; the caller moves it, or a file in it, there.

    It is deleted after the `with` block. First deletes what earlier processes left at
    `target` when they were killed: the system gave up the lock that such a folder's
    writer holds, and the lock file says that zinf made the folder. On Windows nothing
    is deleted, as there is no such lock.
    """
    if sys.platform != "win32":
        _delete_left(target.parent)
    # Process ids repeat: in a container each is often 1.
    folder = target.with_name(f"{target.name}.{secrets.token_hex(4)}{SUFFIX}")
    folder.mkdir(parents=True)
    try:
        with naming(folder), (folder / LOCK).open("x") as lock:
            _claim(lock)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _claim(lock: TextIO) -> None:
    """Lock and mark a folder, so that it can be deleted if this process is killed."""
    if sys.platform == "win32":
        return
    # Some network file systems have no locks. Without the mark the folder may be left,
    # and nobody deletes it while it is written.
    with suppress(OSError):
        # Another process may look just now whether this folder was left.
        while not try_lock(lock.fileno()):
            time.sleep(RETRY_SECONDS)
        lock.write(f"{MARK}{os.getpid()}\n")
        lock.flush()


def _delete_left(directory: Path) -> None:
    for folder in sorted(directory.glob(f"*{SUFFIX}")):
        # A folder without a lock file, or that this user may not read, is not ours.
        with suppress(OSError), (folder / LOCK).open() as lock:
            # A new folder has an empty file before its writer holds the lock.
            if try_lock(lock.fileno()) and lock.read().startswith(MARK):
                logger.warning("%s was left unfinished; it is deleted.", folder)
                shutil.rmtree(folder)
