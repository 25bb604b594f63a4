"""Lists the checkpoints in a folder and the bytes that they take on the drive."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zinf.checkpoint.bucket.keeper import complete, incomplete_steps
from zinf.checkpoint.bucket.store import Store
from zinf.checkpoint.incomplete import ITEM, incomplete
from zinf.checkpoint.manifest import FILE
from zinf.checkpoint.place import ObjectFolder, Place, as_place
from zinf.checkpoint.saved import Saved

Inode = tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """One checkpoint in a folder of them.

    Attributes:
        step: the step; None for a checkpoint that was saved alone, without a number.
        problem: why the checkpoint cannot be used; None if it can.
        array_bytes: bytes of all arrays.
        own_bytes: bytes of the files on the drive. Hard links count once: files that an
            entry before this one has too are left out. In object storage, bytes of the
            chunks of a checkpoint that can be used.
        written_by: the version of zinf that wrote the checkpoint.
    """

    folder: Place
    step: int | None
    problem: str | None = None
    num_arrays: int = 0
    array_bytes: int = 0
    own_bytes: int = 0
    written_by: str = ""


def entries(path: Path | str | ObjectFolder) -> list[Entry]:
    """The checkpoints in a folder by step, followed by the incomplete ones.

    Raises:
        FileNotFoundError: there is no such folder, or it has no checkpoint.
    """
    path = as_place(path)
    if isinstance(path, ObjectFolder):
        return _objects(path)
    seen: set[Inode] = set()
    found = [_entry(folder, step, seen) for step, folder in _complete(path)]
    if (path / FILE).exists():
        return found
    for folder in sorted(incomplete(path)):
        own_bytes = _new_bytes(folder, seen)
        problem = "saving or deleting it was cut short"
        found.append(Entry(folder, None, problem, own_bytes=own_bytes))
    if not found:
        raise _none(path)
    return found


def _objects(folder: ObjectFolder) -> list[Entry]:
    names = Store(folder).names(is_first=True)
    found: list[Entry] = []
    for step, place in complete(folder, names):
        try:
            with Saved(place) as saved:
                grids = map(saved.grid, saved.arrays)
                nbytes = sum(grid.num_chunks * grid.chunk_bytes for grid in grids)
                found.append(_described(saved, step, nbytes))
        except (OSError, ValueError) as error:
            found.append(Entry(place, step, str(error)))
    for step in incomplete_steps(names):
        problem = "saving or deleting it was cut short, or is under way"
        found.append(Entry(folder / str(step), None, problem))
    if not found:
        raise _none(folder)
    return found


def _none(path: Place) -> FileNotFoundError:
    return FileNotFoundError(f"{path} has no checkpoint, and is none.")


def find(path: Path | str | ObjectFolder, step: int | None = None) -> Place:
    """The folder with the manifest of a checkpoint.

    Args:
        path: the folder with the manifest, the folder of a step, or a folder of several
            checkpoints.
        step: which of several checkpoints; None is the newest.

    Raises:
        FileNotFoundError: there is no checkpoint, or none of that step.
    """
    path = as_place(path)
    usable: dict[int | None, Place] = (
        dict(complete(path, Store(path).names(is_first=True)))
        if isinstance(path, ObjectFolder)
        else dict(_complete(path))
    )
    if step is None and usable:
        return usable[max(usable, key=lambda number: -1 if number is None else number)]
    if step in usable:
        return usable[step]
    steps = ", ".join(str(number) for number in usable if number is not None)
    has = f"It has those of steps {steps}." if steps else "It has none."
    which = "" if step is None else f" of step {step}"
    raise FileNotFoundError(f"{path} has no complete checkpoint{which}. {has}")


def _complete(path: Path) -> Iterator[tuple[int | None, Path]]:
    """`(step, folder of the manifest)` of each complete checkpoint, by step."""
    if (path / FILE).exists():
        yield None, path
        return
    if (path / ITEM / FILE).exists():
        step = int(path.name) if path.name.isdecimal() else None
        yield step, path / ITEM
        return
    if not path.is_dir():
        raise FileNotFoundError(f"There is no folder {path}.")
    steps = sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal())
    for step in steps:
        if (path / str(step) / ITEM / FILE).exists():
            yield step, path / str(step) / ITEM


def _entry(folder: Path, step: int | None, seen: set[Inode]) -> Entry:
    own_bytes = _new_bytes(folder, seen)
    try:
        with Saved(folder) as saved:
            return _described(saved, step, own_bytes)
    except (OSError, ValueError) as error:
        return Entry(folder, step, str(error), own_bytes=own_bytes)


def _described(saved: Saved, step: int | None, own_bytes: int) -> Entry:
    return Entry(
        saved.directory,
        step,
        num_arrays=len(saved.arrays),
        array_bytes=sum(spec.nbytes for spec in saved.arrays.values()),
        own_bytes=own_bytes,
        written_by=saved.written_by,
    )


def _new_bytes(folder: Path, seen: set[Inode]) -> int:
    """Bytes of the files whose inodes are not in `seen`; adds these inodes to it."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            status = os.lstat(os.path.join(root, file))
            inode = status.st_dev, status.st_ino
            if stat.S_ISREG(status.st_mode) and inode not in seen:
                seen.add(inode)
                total += status.st_size
    return total
