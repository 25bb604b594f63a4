"""Saves and restores persistent arrays on all tiers."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import Any

import jax

from zinf.checkpoint.bucket.save import ObjectSave
from zinf.checkpoint.errors import Settle, join, other_errors
from zinf.checkpoint.manifest import check_same
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
from zinf.core.program import ArrayId, Role, Tier


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
    place, shares = as_place(directory), shares_of(residents)
    save = (
        ObjectSave(place, residents, shares)
        if isinstance(place, ObjectFolder)
        else Save(place, residents, shares)
    )
    is_first = jax.process_index() == 0
    if is_first:
        save.storage.claim()
    barrier("the folder of a checkpoint is there")
    save.begin()
    save.finish()
    barrier("all of a checkpoint is written")
    if is_first:
        save.commit(scalars, data)
    barrier("a checkpoint is complete")


def read_arrays(
    directory: str | PathLike[str] | ObjectFolder,
    residents: Residents,
    *,
    take_scalars: Callable[[dict[str, Any]], None] | None = None,
    empty: Callable[[dict[str, Any]], Collection[Role]] = lambda scalars: (),
    apart: Callable[[Saved], Collection[ArrayId]] = lambda saved: (),
    settle: Settle | None = None,
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
        empty: called with the scalars; the roles of arrays in which the run that saved
            them had nothing. They stay as they are here, and may be absent there or
            here.
        apart: called with the checkpoint; arrays that it holds in another form than
            here, and those here. They stay as they are here. It may raise to refuse the
            checkpoint.
        settle: called last, for each leaf of which exchanges lose something there or
            here alone; None: such a checkpoint is refused.
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
        others = other_errors(saved, residents) if settle is not None else []
        joined = {a for one in others for a in (*one.there, *one.here)}
        nothing, kept = empty(saved.scalars), joined.union(apart(saved))

        def is_read(array: ArrayId) -> bool:
            return array not in kept and array.role not in nothing

        there, here = (
            {a: spec for a, spec in specs.items() if is_read(a)}
            for specs in (saved.arrays, residents.specs)
        )
        check_same(there, here, saved.directory)
        if take_scalars is not None:
            take_scalars(saved.scalars)
        stripes: dict[ArrayId, Share] = {}
        for share in filter(lambda x: is_read(x.array), shares_of(residents)):
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
        if settle is not None:
            join(saved, residents, others, settle, verify=verify)
        return saved.scalars
