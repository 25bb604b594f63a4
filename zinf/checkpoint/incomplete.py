"""Finds and deletes what a save or a deletion that was cut short has left."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from orbax.checkpoint.path import atomicity_types

from zinf.checkpoint.manifest import FILE

# All that there is in the folder of a step.
OURS = {"state", "_CHECKPOINT_METADATA", "commit_success.txt"}

logger = logging.getLogger(__name__)


def delete_incomplete(directory: Path) -> None:
    """Delete half-written checkpoints in a folder of them, each with a warning."""
    for folder in sorted(incomplete(directory)):
        logger.warning(
            "%s is a checkpoint whose saving or deleting was cut short; it is deleted.",
            folder,
        )
        shutil.rmtree(folder)


def incomplete(directory: Path) -> Iterator[Path]:
    """Checkpoints in a folder that were begun, or begun to be deleted."""
    for folder in directory.iterdir():
        if folder.is_symlink() or not folder.is_dir():
            continue
        if atomicity_types.TMP_DIR_SUFFIX in folder.name:
            yield folder
        elif folder.name.isdecimal() and not (folder / "state" / FILE).exists():
            if {path.name for path in folder.iterdir()} <= OURS:
                yield folder
