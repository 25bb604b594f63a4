"""Finds and deletes incomplete checkpoints: a save or a deletion was cut short.

Only what a marker proves to be a save by zinf is ever deleted. Folders are named by
numbers, and so may be anybody's: photographs by year, or checkpoints by Orbax alone.
"""

import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orbax.checkpoint.path import atomicity_types

from zinf.checkpoint.manifest import FILE
from zinf.core.memory.nvme.system import sync_file, sync_folder
from zinf.core.text.json_text import from_json

MARKER = "zinf-save.json"
ITEM = "state"
# Names that a step's folder may have. A folder with any other name in it is left alone.
OURS = {ITEM, MARKER, "_CHECKPOINT_METADATA", "commit_success.txt"}

logger = logging.getLogger(__name__)


def mark(folder: Path) -> None:
    """Write the marker of a save by this process, and sync it."""
    about = {"written_by": "zinf", "host": socket.gethostname(), "pid": os.getpid()}
    path = folder / MARKER
    path.write_text(json.dumps(about) + "\n")
    sync_file(path)
    sync_folder(folder)


def marker_of(folder: Path) -> dict[str, Any] | None:
    """The content of a folder's marker; None if it has no marker by zinf."""
    path = folder / MARKER
    if path.is_symlink() or not path.is_file():
        return None
    try:
        about = from_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(about, dict) and about.get("written_by") == "zinf"
    return about if is_ours else None


def delete_incomplete(directory: Path) -> None:
    """Delete the incomplete checkpoints in `directory`, with a warning for each.

    The save of another process that runs on this host is left alone.
    """
    for folder in sorted(incomplete(directory)):
        if _is_under_way(folder):
            logger.warning("%s is being saved by another process.", folder)
            continue
        logger.warning(
            "%s is a checkpoint whose saving or deleting was cut short; it is deleted.",
            folder,
        )
        delete(folder)


def delete(folder: Path) -> None:
    """Delete a checkpoint, complete or not; its marker goes last.

    So what is left after a deletion that was cut short is still known as zinf's.
    """
    (folder / ITEM / FILE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    (folder / MARKER).unlink(missing_ok=True)
    folder.rmdir()


def incomplete(directory: Path) -> Iterator[Path]:
    """The checkpoints in `directory` that are only partly saved or partly deleted."""
    for folder in directory.iterdir():
        if folder.is_symlink() or not folder.is_dir() or marker_of(folder) is None:
            continue
        if atomicity_types.TMP_DIR_SUFFIX in folder.name:
            yield folder
        elif folder.name.isdecimal() and not (folder / ITEM / FILE).exists():
            if {path.name for path in folder.iterdir()} <= OURS:
                yield folder


def complete_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, in order."""
    if not directory.is_dir():
        return []
    return sorted(
        int(folder.name)
        for folder in directory.iterdir()
        if folder.name.isdecimal() and (folder / ITEM / FILE).is_file()
    )


def _is_under_way(folder: Path) -> bool:
    about = marker_of(folder) or {}
    pid = about.get("pid")
    is_here = about.get("host") == socket.gethostname()
    if not is_here or not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    return True
