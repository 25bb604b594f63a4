"""Saving and restoring persistent arrays block by block, on whatever tier they rest."""

import errno
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zinf.checkpoint.blocks import Finish, Transfer, blocks, held_bytes, move
from zinf.checkpoint.chunk_writer import ChunkWriter
from zinf.checkpoint.failure import explain, failure
from zinf.checkpoint.grid import Grid, Index, whole_box
from zinf.checkpoint.manifest import Manifest, StoredArray, check_same
from zinf.checkpoint.saved import Saved
from zinf.memory import StorageError
from zinf.memory.chunk import chunk_shape
from zinf.memory.residents import Residents
from zinf.program import ArrayId, ArraySpec, Tier
from zinf.sharding import Box, relative


def write_arrays(
    directory: Path,
    residents: Residents,
    scalars: Mapping[str, Any],
    data: Any = None,
) -> None:
    """Save every array of `residents`, and `scalars`, as the checkpoint `directory`.

    Each array is a zarr v3 array, uncompressed, in `directory/role/key path`; the
    manifest has checksums of all files. At most two blocks of 16 MiB are on the host at
    a time, and one on the device, counted in their ledgers. All is on the drive, safe
    from a power cut, when this returns. The manifest is written last: without one, a
    checkpoint is not complete.

    The arrays must not change meanwhile. Where they rest does not matter. Of several
    processes all have to call, since each has a share, and the first one writes.

    Args:
        directory: absent or empty.
        scalars: JSON values.
        data: where the training data is read next, as a JSON value.

    Raises:
        FileExistsError: the folder holds something already.
        StorageError: it cannot be written, or there is too little space, which is
            found before anything is written.
        BudgetExceeded: a tier has no room for the blocks.
    """
    if jax.process_index():
        _give_shares(residents)
        return
    _claim(directory, sum(spec.nbytes for spec in residents.specs.values()))
    stored: dict[ArrayId, StoredArray] = {}
    with (
        _explained("Cannot save a checkpoint", directory),
        closing(ChunkWriter(directory)) as writer,
    ):
        sums: dict[ArrayId, dict[Index, int]] = {}

        def transfers() -> Iterator[Transfer]:
            for array, spec in residents.specs.items():
                grid = Grid(spec, chunk_shape(spec))
                stored[array] = StoredArray(grid, writer.begin(array, grid))
                sums[array] = {}
                for block in blocks(array, spec):
                    begin = partial(_save, block, grid, residents, writer, sums[array])
                    yield _nbytes(block, spec), begin

        with _blocks_held(residents, "saving a checkpoint") as capacity_bytes:
            move(transfers(), capacity_bytes)
        writer.sync()
    complete = {
        array: StoredArray(
            entry.grid,
            entry.metadata,
            tuple(sums[array][index] for index in entry.grid.indices()),
        )
        for array, entry in stored.items()
    }
    Manifest(complete, dict(scalars), data).write(directory)


def _give_shares(residents: Residents) -> None:
    """Takes part in reading what another process writes."""
    with _blocks_held(residents, "saving a checkpoint"):
        for array, spec in residents.specs.items():
            for block in blocks(array, spec):
                residents.read(block)


def read_arrays(
    directory: Path,
    residents: Residents,
    *,
    take_scalars: Callable[[dict[str, Any]], None] | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Overwrite every array of `residents` by the one saved in `directory`.

    They may rest on other tiers than when they were saved. The names, shapes and dtypes
    of all are compared before the first is overwritten. Returns the scalars.

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

        def transfers() -> Iterator[Transfer]:
            for array, spec in residents.specs.items():
                for block in blocks(array, spec):
                    begin = partial(_restore, block, residents, saved, verify)
                    yield _nbytes(block, spec), begin

        with _blocks_held(residents, "restoring a checkpoint") as capacity_bytes:
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


def _claim(directory: Path, needed_bytes: int) -> None:
    """Make the folder, or take an empty one, if it can hold that much."""
    with _explained("Cannot make the folder of a checkpoint", directory):
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    if not is_empty:
        raise FileExistsError(
            f"{directory} is not empty, and a checkpoint is never overwritten. Name "
            "another folder, or delete that one first."
        )
    check_space(directory, needed_bytes)


def _save(
    block: ArrayId,
    grid: Grid,
    residents: Residents,
    writer: ChunkWriter,
    checksums: dict[Index, int],
) -> Finish:
    content = residents.read(block)
    box = _box(block, grid.spec)
    writing: list[tuple[Index, Future[int]]] = []
    for index in grid.meeting(box):
        part: np.ndarray = content[(*relative(grid.box(index), box), ...)]
        writing.append((index, writer.write(block.whole, grid, index, part)))

    def finish() -> None:
        for index, future in writing:
            checksums[index] = future.result()

    return finish


def _restore(
    block: ArrayId, residents: Residents, saved: Saved, verify: bool
) -> Finish:
    box = _box(block, residents.specs[block.whole])
    reading = saved.begin_read(block.whole, box, verify=verify)

    def finish() -> None:
        residents.write(block, reading.result())

    return finish


@contextmanager
def _blocks_held(residents: Residents, what: str) -> Generator[int, None, None]:
    """Counts the blocks that are moved at once as held, and gives their host bytes."""
    held = held_bytes(residents)
    with ExitStack() as releases:
        for tier, nbytes in held.items():
            ledger = residents.stores[tier].ledger
            ledger.reserve(nbytes, what)
            releases.callback(ledger.release, nbytes)
        yield held[Tier.HOST]


@contextmanager
def _explained(what: str, folder: Path) -> Generator[None, None, None]:
    """Makes a StorageError with a checkpoint's advice of what the system raises."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise failure(what, folder, error) from error


def _box(block: ArrayId, spec: ArraySpec) -> Box:
    box = whole_box(spec.shape)
    return box if block.rows is None else (block.rows, *box[1:])


def _nbytes(block: ArrayId, spec: ArraySpec) -> int:
    return (spec.rows(*block.rows) if block.rows else spec).nbytes
