"""Saving and restoring persistent arrays block by block, on whatever tier they rest."""

import errno
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import tensorstore as ts

from zinf.checkpoint.blocks import Finish, Transfer, blocks, held_bytes, move
from zinf.checkpoint.failure import explain, failure
from zinf.checkpoint.manifest import Manifest, check_same, read_manifest
from zinf.memory.chunk import chunk_shape
from zinf.memory.residents import Residents
from zinf.memory.zarr_format import as_stored, numpy_dtype, zarr_spec
from zinf.program import ArrayId, ArraySpec, Tier

# "." is escaped in names, so none can be "..", "zarr.json" or a chunk file.
PLAIN_CHARACTERS = "[](){}=+,:'! @"
# Every byte is used once, so a cache would only hold it twice.
CONTEXT = {"cache_pool": {"total_bytes_limit": 0}}


def write_arrays(
    directory: Path, residents: Residents, scalars: Mapping[str, Any]
) -> None:
    """Save every array of `residents`, and `scalars`, as the checkpoint `directory`.

    Each array is a zarr v3 array, uncompressed, in `directory/role/key path`, with a
    checksum in every chunk file (zarr's crc32c codec) that any zarr reader verifies.
    At most two blocks of 16 MiB are on the host at a time, and one on the device,
    counted in their ledgers. All is on the drive, safe from a power cut, when this
    returns. The manifest is written last: without one, a checkpoint is not complete.

    The arrays must not change meanwhile. Where they rest does not matter. Of several
    processes all have to call, since each has a share, and the first one writes.

    Args:
        directory: absent or empty.
        scalars: JSON values.

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
    context = ts.Context(CONTEXT)

    def transfers() -> Iterator[Transfer]:
        for array, spec in residents.specs.items():
            folder = directory / folder_name(array)
            with _explained(f"Cannot save {array}", folder):
                zarr = ts.open(_zarr_spec(folder, spec), context=context, create=True)
                target = zarr.result()
            for block in blocks(array, spec):
                begin = partial(_save, block, residents, target, folder)
                yield _nbytes(block, spec), begin

    with _blocks_held(residents, "saving a checkpoint") as capacity_bytes:
        move(transfers(), capacity_bytes)
    Manifest(residents.specs, dict(scalars)).write(directory)


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
) -> dict[str, Any]:
    """Overwrite every array of `residents` by the one saved in `directory`.

    They may rest on other tiers than when they were saved. The names, shapes and dtypes
    of all are compared before the first is overwritten. Returns the scalars.

    Args:
        take_scalars: called with the scalars before the first array is overwritten,
            so that it can refuse them.

    Raises:
        FileNotFoundError: there is no checkpoint, or no complete one.
        ValueError: it is of another model or optimizer; the message says where.
        StorageError: a file is missing, damaged or cannot be read. Some arrays may be
            overwritten then: restore another checkpoint.
        BudgetExceeded: a tier has no room for the blocks.
    """
    manifest = read_manifest(directory)
    check_same(manifest, residents.specs, directory)
    if take_scalars is not None:
        take_scalars(manifest.scalars)
    context = ts.Context(CONTEXT)

    def transfers() -> Iterator[Transfer]:
        for array, spec in residents.specs.items():
            folder = directory / folder_name(array)
            with _explained(f"Cannot restore {array}", folder):
                zarr = ts.open(_zarr_spec(folder, spec), context=context, open=True)
                source = zarr.result()
            for block in blocks(array, spec):
                begin = partial(_restore, block, residents, source, folder)
                yield _nbytes(block, spec), begin

    with _blocks_held(residents, "restoring a checkpoint") as capacity_bytes:
        move(transfers(), capacity_bytes)
    return manifest.scalars


def folder_name(array: ArrayId) -> str:
    """Where an array lies in a checkpoint: `role/key path`."""
    return "/".join(map(_escape, (array.role, *array.path.split("/"))))


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
    block: ArrayId, residents: Residents, target: ts.TensorStore, folder: Path
) -> Finish:
    # What the stores raise names the array itself.
    content = residents.read(block)
    selected = target[slice(*block.rows)] if block.rows else target
    stored = as_stored(content)
    writing = selected.write(stored, can_reference_source_data_indefinitely=True)

    def finish() -> None:
        with _explained(f"Cannot save {block}", folder):
            writing.commit.result()

    return finish


def _restore(
    block: ArrayId, residents: Residents, source: ts.TensorStore, folder: Path
) -> Finish:
    dtype = numpy_dtype(residents.specs[block.whole].dtype)
    selected = source[slice(*block.rows)] if block.rows else source
    reading = selected.read()

    def finish() -> None:
        with _explained(f"Cannot restore {block}", folder):
            content = reading.result()
        residents.write(block, content.view(dtype))

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
    """Makes a StorageError of what the system or TensorStore raises."""
    try:
        yield
    except (OSError, ValueError, OverflowError, NotImplementedError) as error:
        raise failure(what, folder, error) from error


def _nbytes(block: ArrayId, spec: ArraySpec) -> int:
    return (spec.rows(*block.rows) if block.rows else spec).nbytes


def _escape(name: str) -> str:
    """`name` as one component of a file path; different names stay different."""
    return quote(name, safe=PLAIN_CHARACTERS).replace(".", "%2E") or "%"


def _zarr_spec(folder: Path, spec: ArraySpec) -> dict[str, Any]:
    return zarr_spec(folder, spec, chunk_shape(spec), codecs=["crc32c"])
