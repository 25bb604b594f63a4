"""Saving and restoring persistent arrays, on whatever tiers they rest."""

import errno
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax

from zinf.checkpoint.blocks import (
    Finish,
    Transfer,
    block_bytes,
    counted,
    held_bytes,
    move,
)
from zinf.checkpoint.failure import explain, failure
from zinf.checkpoint.manifest import check_same
from zinf.checkpoint.parts import commit
from zinf.checkpoint.restore import begin_restore, blocks_to_restore
from zinf.checkpoint.save import Save
from zinf.checkpoint.saved import Saved
from zinf.checkpoint.share import Share, shares_of
from zinf.memory import StorageError
from zinf.memory.residents import Residents
from zinf.program import ArrayId

Barrier = Callable[[str], None]


def write_arrays(
    directory: Path,
    residents: Residents,
    scalars: Mapping[str, Any],
    data: Any = None,
    *,
    barrier: Barrier = lambda name: None,
) -> None:
    """Save every array of `residents`, and `scalars`, as the checkpoint `directory`.

    Each array is a zarr v3 array, uncompressed, in `directory/role/key path`, of files
    that are linked where they are on the NVMe tier already; the manifest has checksums
    of all. All is on the drive, safe from a power cut, when this returns. The manifest
    is written last: without one, a checkpoint is not complete.

    The arrays must not change meanwhile. Where they rest does not matter. Of several
    processes each writes its own share, and all have to call.

    Args:
        directory: absent or empty; the same for all processes.
        scalars: JSON values.
        data: where the training data is read next, as a JSON value.
        barrier: waits until all processes have called it, with the same name.

    Raises:
        FileExistsError: the folder holds something already.
        StorageError: it cannot be written, or there is too little space, which is
            found before anything is written.
        BudgetExceeded: a tier has no room for the blocks.
    """
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
    """Begin a save, if there is room for what it will write.

    Raises:
        StorageError: there is not, or it cannot be begun; nothing is held then.
    """
    try:
        with _explained("Cannot begin a checkpoint", save.directory):
            save.begin()
        check_space(save.directory, save.snapshot.copied_bytes)
    except BaseException:
        save.cancel()
        remove(save.directory)
        raise


def finish(save: Save) -> None:
    """Write what was begun; if that fails, nothing is left of it."""
    try:
        save.finish()
    except BaseException:
        remove(save.directory)
        raise


def remove(directory: Path) -> None:
    """Delete what was written of a checkpoint, as far as that can be done.

    It may be on a drive that is full. Whatever is left has no manifest.
    """
    shutil.rmtree(directory, ignore_errors=True)


def read_arrays(
    directory: Path,
    residents: Residents,
    *,
    take_scalars: Callable[[dict[str, Any]], None] | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Overwrite every array of `residents` by the one saved in `directory`.

    They may rest on other tiers than when they were saved, and on other devices and
    processes: each reads what it needs. The names, shapes and dtypes of all are
    compared before the first is overwritten. Returns the scalars.

    Args:
        take_scalars: called with the scalars before the first array is overwritten,
            so that it can refuse them.
        verify: compare what is read with its checksums.

    Raises:
        FileNotFoundError: there is no checkpoint, or no complete one.
        ValueError: it is of another model or optimizer; the message says where.
        StorageError: a file is missing, damaged or cannot be read. Some arrays may be
            overwritten then: restore another checkpoint.
        BudgetExceeded: a tier has no room for the blocks.
    """
    with Saved(directory) as saved:
        check_same(saved.arrays, residents.specs, directory)
        if take_scalars is not None:
            take_scalars(saved.scalars)
        blocks: dict[ArrayId, Share] = {}
        for share in shares_of(residents):
            grid = saved.grid(share.array)
            for block in blocks_to_restore(share, grid, residents):
                blocks[block] = share

        def transfers() -> Iterator[Transfer]:
            for block, share in blocks.items():
                begin: Callable[[], Finish] = partial(
                    begin_restore, block, share, residents, saved, verify=verify
                )
                yield block_bytes(block, share), begin

        held = held_bytes(blocks, residents)
        with counted(held, residents, "restoring a checkpoint") as capacity_bytes:
            move(transfers(), capacity_bytes)
        return saved.scalars


def check_space(directory: Path, needed_bytes: int) -> None:
    """Raise StorageError unless `needed_bytes` more can be written in `directory`."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        found = (
            f"it takes {needed_bytes:,} bytes and {free_bytes:,} are free: "
            f"{needed_bytes - free_bytes:,} too few"
        )
        raise explain("Cannot save a checkpoint", errno.ENOSPC, directory, found)


def claim(directory: Path) -> None:
    """Make the folder of a checkpoint, or take an empty one."""
    with _explained("Cannot make the folder of a checkpoint", directory):
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    if not is_empty:
        raise FileExistsError(
            f"{directory} is not empty, and a checkpoint is never overwritten. Name "
            "another folder, or delete that one first."
        )


@contextmanager
def _explained(what: str, folder: Path) -> Generator[None, None, None]:
    """Makes a StorageError with a checkpoint's advice of what the system raises."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise failure(what, folder, error) from error
