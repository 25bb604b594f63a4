"""Saves and restores persistent arrays on all tiers."""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

import jax

from zinf.checkpoint import bucket
from zinf.checkpoint.grid import folder_name
from zinf.checkpoint.manifest import check_same
from zinf.checkpoint.parts import commit
from zinf.checkpoint.place import ObjectFolder, as_place
from zinf.checkpoint.restore import begin_restore, can_write_rows, stripes_to_restore
from zinf.checkpoint.save import Barrier, Save
from zinf.checkpoint.saved import Saved
from zinf.checkpoint.share import Share, shares_of
from zinf.checkpoint.stripes import (
    Finish,
    Transfer,
    counted,
    fitted,
    held_bytes,
    move,
    room,
    stripe_bytes,
)
from zinf.core.memory.residents import Residents
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.program import ArrayId, Tier

# At most so many bytes of a path are Orbax's temporary names and the name of a chunk.
PATH_REST = 128


def write_arrays(
    directory: str | PathLike[str] | ObjectFolder,
    residents: Residents,
    scalars: Mapping[str, Any],
    data: Any = None,
    *,
    barrier: Barrier = lambda name: None,
) -> None:
    """Save every array of `residents`, and `scalars`, as the checkpoint `directory`.

    Each array becomes an uncompressed zarr v3 array in `directory/role/key path`. Chunk
    files of the NVMe tier are hard-linked; everything else is written. The manifest has
    the checksums of all files. It is written last: a folder without a manifest is not a
    complete checkpoint. When this function returns, all files are synced to the drive
    and survive a power cut.

    The arrays may rest on any tiers and must not change during the save. If there are
    several processes, all must call this function; each writes its own share.

    Args:
        directory: absent or empty; the same for all processes. It may be a URL of
            object storage (`zinf.checkpoint.bucket`).
        scalars: JSON values.
        data: where the training data is read next, as a JSON value.
        barrier: waits until all processes have called it with the same name.

    Raises:
        FileExistsError: the folder is not empty.
        StorageError: a file cannot be written, or the drive has too little free space.
            The space is checked before the first byte is written.
        BudgetExceeded: a tier has no room for the stripes.
    """
    directory = as_place(directory)
    if isinstance(directory, ObjectFolder):
        bucket.write_arrays(directory, residents, scalars, data, barrier=barrier)
        return
    is_first = jax.process_index() == 0
    if is_first:
        claim(directory)
    barrier("the folder of a checkpoint is there")
    save = Save(directory, residents, shares_of(residents))
    begin(save)
    finish(save)
    barrier("all of a checkpoint is written")
    if is_first:
        commit(directory, save.part, scalars, data, num_processes=jax.process_count())
    barrier("a checkpoint is complete")


def begin(save: Save) -> None:
    """Link and hold the arrays, then check that the drive has room for the rest.

    Raises:
        StorageError: the drive has no room, or an array cannot be linked or held. All
            holds are released and the folder is deleted.
    """
    try:
        with CHECKPOINT.explained("Cannot begin a checkpoint", save.directory):
            save.begin()
        check_space(save.directory, save.snapshot.copied_bytes)
    except BaseException:
        save.cancel()
        remove(save.directory)
        raise


def finish(save: Save) -> None:
    """Write the files of a save that was begun; on failure, delete its folder."""
    try:
        save.finish()
    except BaseException:
        remove(save.directory)
        raise


def remove(directory: Path) -> None:
    """Delete the files of an incomplete checkpoint; ignore files that stay.

    Deleting may fail, for example on a broken drive. The files that stay have no
    manifest, so they are not taken for a checkpoint.
    """
    shutil.rmtree(directory, ignore_errors=True)


def read_arrays(
    directory: str | PathLike[str] | ObjectFolder,
    residents: Residents,
    *,
    take_scalars: Callable[[dict[str, Any]], None] | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Overwrite every array of `residents` with the one saved in `directory`.

    The arrays may now rest on other tiers, devices and processes than when they were
    saved: each process reads the chunks that it needs. The names, shapes and dtypes of
    all arrays are compared before the first array is overwritten.

    Returns:
        The scalars of the checkpoint.

    Args:
        take_scalars: called with the scalars before the first array is overwritten. It
            may raise to refuse them.
        verify: compare every chunk that is read with its checksum.

    Raises:
        FileNotFoundError: there is no checkpoint, or it is not complete.
        ValueError: the checkpoint is of another model or optimizer; the message names
            the arrays that differ.
        StorageError: a file is missing, damaged or cannot be read. Some arrays may
            already be overwritten: restore another checkpoint.
        BudgetExceeded: a tier has no room for the stripes.
    """
    with Saved(directory) as saved:
        check_same(saved.arrays, residents.specs, saved.directory)
        if take_scalars is not None:
            take_scalars(saved.scalars)
        stripes: dict[ArrayId, Share] = {}
        for share in shares_of(residents):
            grid = saved.grid(share.array)
            for stripe in stripes_to_restore(share, grid, residents):
                stripes[stripe] = share

        def transfers() -> Iterator[Transfer]:
            for stripe, share in stripes.items():
                begin: Callable[[], Finish] = partial(
                    begin_restore, stripe, share, residents, saved, verify=verify
                )
                yield stripe_bytes(stripe, share), begin

        left = room(residents)
        left[Tier.HOST] = max(0, left[Tier.HOST] - saved.staging_bytes)
        stripes = fitted(stripes, residents, left, partial(can_write_rows, residents))
        held = held_bytes(stripes, residents, left)
        held[Tier.HOST] += saved.staging_bytes
        with counted(held, residents, "restoring a checkpoint") as capacity_bytes:
            move(transfers(), capacity_bytes - saved.staging_bytes)
        return saved.scalars


def check_space(directory: Path, needed_bytes: int) -> None:
    """Raise StorageError unless `needed_bytes` are free on the drive of `directory`."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        found = (
            f"it takes {needed_bytes:,} bytes and {free_bytes:,} are free: "
            f"{needed_bytes - free_bytes:,} too few"
        )
        raise CHECKPOINT.error(
            "Cannot save a checkpoint", errno.ENOSPC, directory, found
        )


def _longest_names(directory: Path) -> tuple[float, float]:
    """The most bytes that a name and a path may have in a folder."""
    if sys.platform != "win32":
        with CHECKPOINT.explained("Cannot save a checkpoint", directory):
            name = os.pathconf(directory, "PC_NAME_MAX")
            return name, os.pathconf(directory, "PC_PATH_MAX")
    return inf, inf  # Windows cannot say it.


def check_names(directory: Path, arrays: Iterable[ArrayId]) -> None:
    """Raise StorageError if the file system has no room for a name of a checkpoint.

    Args:
        directory: the folder of a step, which need not exist.
    """
    longest_name, longest_path = _longest_names(directory.parent)
    for array in arrays:
        folder = folder_name(array)
        name = max(map(len, folder.split("/")))
        path = len(os.fsencode(directory)) + len(folder) + PATH_REST
        found = None
        if name > longest_name:
            found = f"a name of {name:,} bytes, and {longest_name:,} are allowed"
        elif path > longest_path:
            found = f"a path of {path:,} bytes, and {longest_path:,} are allowed"
        if found is not None:
            what = f"Cannot save {array}"
            code = errno.ENAMETOOLONG
            raise CHECKPOINT.error(
                what, code, directory.parent, f"its folder would have {found}"
            )


def claim(directory: Path) -> None:
    """Make the folder of a checkpoint, or use an empty one that exists."""
    with CHECKPOINT.explained("Cannot make the folder of a checkpoint", directory):
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    if not is_empty:
        raise FileExistsError(
            f"{directory} is not empty, and a checkpoint is never overwritten. Name "
            "another folder, such as one for each step, which "
            "zinf.checkpoint.Checkpoints does by itself, or delete that one first."
        )
