"""The share of an array that one process saves, in files of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax

from zinf.checkpoint.grid import Grid, Index, whole_box
from zinf.core.memory.chunk import MAX_CHUNK_BYTES, MAX_EXCESS, chunk_shape, on_one_grid
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, ArraySpec, Tier
from zinf.core.sharding import Box, Layout, intersection


@dataclass(frozen=True)
class Share:
    """The part of an array that this process has.

    Attributes:
        array: the whole array.
        grid: the chunks of the whole array, which the files of all processes form.
        layout: which part of the array this process has.
    """

    array: ArrayId
    grid: Grid
    layout: Layout

    @cached_property
    def spec(self) -> ArraySpec:
        spec = self.grid.spec
        return ArraySpec(self.layout.share_shape, spec.dtype, spec.itemsize)

    @cached_property
    def is_ours(self) -> bool:
        """Whether this process writes the share; others may have the same share."""
        return jax.process_index() == self.layout.keepers[0]

    @cached_property
    def stripes(self) -> Sequence[ArrayId]:
        """The share as stripes of rows, counted from the first row of the share.

        Each stripe has the rows of one row of chunk files. No stripe has only padding.
        An array without elements has no stripes.
        """
        if not prod(self.grid.spec.shape):
            return ()
        if not self.spec.shape:
            return (self.array,)
        found: list[ArrayId] = []
        step, num_rows = self.grid.chunk[0], self.spec.shape[0]
        for start in range(0, num_rows, step):
            rows = (start, min(start + step, num_rows))
            stripe = self.array.piece(rows)
            if self.place(stripe) is not None:
                found.append(self.array if rows == (0, num_rows) else stripe)
        return found

    def place(self, stripe: ArrayId) -> Box | None:
        """The box of a stripe in the array without padding; None if all is padding."""
        return intersection(self.box(stripe), whole_box(self.grid.spec.shape))

    def box(self, stripe: ArrayId) -> Box:
        """The box of a stripe in the padded array."""
        if stripe.rows is None:
            return self.layout.box
        (first, _), *rest = self.layout.box
        return ((stripe.rows[0] + first, stripe.rows[1] + first), *rest)

    def index(self, name: str) -> Index:
        """The index in the array's grid of the chunk file `name` of the share."""
        own = map(int, name.split(".")[1:])
        places = zip(own, self.layout.box, self.grid.chunk, strict=True)
        return tuple(place + start // length for place, (start, _), length in places)


def shares_of(residents: Residents) -> list[Share]:
    """The shares of all arrays. They stay valid as long as the placement does."""
    return [share_of(residents, array) for array in residents.specs]


def share_of(residents: Residents, array: ArrayId) -> Share:
    """The share of this process, in the chunks of the NVMe tier where possible."""
    layout = residents.layouts.of(array)
    spec = residents.layouts.share(array)
    chunk = _common_chunk(spec, layout)
    if any(residents.homes[p] == Tier.NVME for p in residents.pieces(array)):
        own = residents.stores.drives.layout(array).chunk
        chunk = own if on_one_grid(spec, own, layout.cut_dims) else chunk
    return Share(array, Grid(residents.specs[array], chunk), layout)


def _common_chunk(spec: ArraySpec, layout: Layout) -> tuple[int, ...]:
    """A chunk shape with which the chunks of all shares lie on one grid."""
    chunk = chunk_shape(spec, cut_dims=layout.cut_dims)
    if on_one_grid(spec, chunk, layout.cut_dims):
        return chunk
    # No chunk length near 16 MiB divides the cut dim, as when its length is prime. Make
    # it one chunk if that is not too large, else one chunk per index.
    cut = next(d for d in layout.cut_dims if spec.shape[d] % chunk[d])
    inner_bytes = prod(spec.shape[cut + 1 :]) * spec.itemsize
    is_moderate = spec.shape[cut] * inner_bytes <= MAX_EXCESS * MAX_CHUNK_BYTES
    length = spec.shape[cut] if is_moderate else 1
    return (*chunk[:cut], length, *chunk[cut + 1 :])
