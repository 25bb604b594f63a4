"""Finds and deletes incomplete checkpoints: a save or a deletion was cut short."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from orbax.checkpoint.path import atomicity_types

from zinf.checkpoint.manifest import FILE

# Names that a step's folder may have. A folder with any other name in it is not ours.
OURS = {"state", "_CHECKPOINT_METADATA", "commit_success.txt"}

logger = logging.getLogger(__name__)


def delete_incomplete(directory: Path) -> None:
    """Delete the incomplete checkpoints in `directory`, with a warning for each."""
    for folder in sorted(incomplete(directory)):
        logger.warning(
            "%s is a checkpoint whose saving or deleting was cut short; it is deleted.",
            folder,
        )
        shutil.rmtree(folder)


def incomplete(directory: Path) -> Iterator[Path]:
    """The checkpoints in `directory` that are only partly saved or partly deleted."""
    for folder in directory.iterdir():
        if folder.is_symlink() or not folder.is_dir():
            continue
        if atomicity_types.TMP_DIR_SUFFIX in folder.name:
            yield folder
        elif folder.name.isdecimal() and not (folder / "state" / FILE).exists():
            if {path.name for path in folder.iterdir()} <= OURS:
                yield folder
