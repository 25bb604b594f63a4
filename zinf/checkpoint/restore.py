"""Reads stripes of an array from a checkpoint and writes them to their tier."""

from collections.abc import Iterator
from math import prod

import jax
import numpy as np

from zinf.checkpoint.grid import Grid
from zinf.checkpoint.saved import Saved
from zinf.checkpoint.share import Share
from zinf.checkpoint.stripes import Finish
from zinf.core.memory.residents import Residents
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArrayId, Tier
from zinf.core.sharding import relative


def stripes_to_restore(
    share: Share, grid: Grid, residents: Residents
) -> Iterator[ArrayId]:
    """The stripes of rows in which a share is restored, counted from its first row.

    A stripe has the rows of one row of chunk files, so no file is read twice. A share
    on several devices whose leading dim is sharded is one stripe;
    `Residents.write_share` says why.

    Args:
        grid: the grid of the array in the checkpoint.
    """
    array, shape = share.array, grid.spec.shape
    if not prod(shape):
        return
    is_on_devices = residents.homes.get(array) == Tier.DEVICE
    if not shape or (is_on_devices and not share.layout.has_whole_rows):
        yield array
        return
    (first, last), *_ = share.layout.box
    step, end = grid.chunk[0], min(last, shape[0])
    if first >= end:
        return  # The share has only padding.
    for start in range(first - first % step, end, step):
        rows = max(start, first) - first, min(start + step, end) - first
        is_all = rows == (0, share.spec.shape[0])
        yield array if is_all else array.piece(rows)


def can_write_rows(residents: Residents, share: Share) -> bool:
    """Whether rows of a share, as many as fit, can be written without the others.

    Writing to the devices of several processes is a collective: all of them would have
    to cut the share alike, and their budgets may leave them different room.
    """
    pieces = residents.pieces(share.array)
    if all(residents.homes[piece] != Tier.DEVICE for piece in pieces):
        return True
    return share.layout.has_whole_rows and jax.process_count() == 1


def begin_restore(
    stripe: ArrayId, share: Share, residents: Residents, saved: Saved, *, verify: bool
) -> Finish:
    """Begin to read a stripe; the function returned waits for it and writes it."""
    box, place = share.box(stripe), share.place(stripe)
    reading = None
    if place is not None:
        reading = saved.begin_read(share.array, place, verify=verify)

    def finish() -> None:
        content = None if reading is None else reading.result()
        if place is None or place != box:
            # The padding of a share is zero.
            shape = tuple(stop - start for start, stop in box)
            padded = np.zeros(shape, numpy_dtype(share.spec.dtype))
            if place is not None:
                padded[relative(place, box)] = content
            content = padded
        assert content is not None
        residents.write_share(stripe, content)

    return finish
