"""What a process saves of an array: its share of it, in files of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax

from zinf.checkpoint.grid import Grid, Index, whole_box
from zinf.memory import NvmeStore
from zinf.memory.chunk import MAX_CHUNK_BYTES, MAX_EXCESS, chunk_shape, on_one_grid
from zinf.memory.residents import Residents
from zinf.program import ArrayId, ArraySpec, Tier
from zinf.sharding import Box, Layout, intersection


@dataclass(frozen=True)
class Share:
    """Attributes:
    array: the whole.
    grid: of the files of all processes together.
    layout: which part of it this process has.
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
        """Whether this process writes the share, of all that have the same."""
        return jax.process_index() == self.layout.keepers[0]

    @cached_property
    def blocks(self) -> Sequence[ArrayId]:
        """The share by rows, counted in it: each is a row of chunk files of its own.

        Rows beyond the array, which only pad the share, are in none, and nor is an
        array without elements.
        """
        if not prod(self.grid.spec.shape):
            return ()
        if not self.spec.shape:
            return (self.array,)
        found: list[ArrayId] = []
        step, num_rows = self.grid.chunk[0], self.spec.shape[0]
        for start in range(0, num_rows, step):
            rows = (start, min(start + step, num_rows))
            block = ArrayId(self.array.role, self.array.path, rows)
            if self.place(block) is not None:
                found.append(self.array if rows == (0, num_rows) else block)
        return found

    def place(self, block: ArrayId) -> Box | None:
        """Where in the array a block lies, without what pads it; None is nowhere."""
        return intersection(self.box(block), whole_box(self.grid.spec.shape))

    def box(self, block: ArrayId) -> Box:
        """Where in the padded array a block lies."""
        if block.rows is None:
            return self.layout.box
        (first, _), *rest = self.layout.box
        return ((block.rows[0] + first, block.rows[1] + first), *rest)

    def index(self, name: str) -> Index:
        """Which chunk of the array the chunk `name` of the share is."""
        own = map(int, name.split(".")[1:])
        places = zip(own, self.layout.box, self.grid.chunk, strict=True)
        return tuple(place + start // length for place, (start, _), length in places)


def shares_of(residents: Residents) -> list[Share]:
    """Those of all arrays, which stay the same for as long as they are placed so."""
    return [share_of(residents, array) for array in residents.specs]


def share_of(residents: Residents, array: ArrayId) -> Share:
    """The share of this process, in the files that it has on nvme where it can be."""
    layout = residents.layouts.of(array)
    spec = residents.layouts.share_spec(array, residents.specs[array])
    chunk = _common_chunk(spec, layout)
    if any(residents.homes[p] == Tier.NVME for p in residents.pieces(array)):
        store = residents.stores[Tier.NVME]
        assert isinstance(store, NvmeStore)
        own = store.layout(array).chunk
        chunk = own if on_one_grid(spec, own, layout.cut_dims) else chunk
    return Share(array, Grid(residents.specs[array], chunk), layout)


def _common_chunk(spec: ArraySpec, layout: Layout) -> tuple[int, ...]:
    """Chunks of a share that lie on one grid with those of the other shares."""
    chunk = chunk_shape(spec, cut_dims=layout.cut_dims)
    if on_one_grid(spec, chunk, layout.cut_dims):
        return chunk
    # A length such as a prime: in one piece, or in as many as it has.
    cut = next(d for d in layout.cut_dims if spec.shape[d] % chunk[d])
    inner_bytes = prod(spec.shape[cut + 1 :]) * spec.itemsize
    is_moderate = spec.shape[cut] * inner_bytes <= MAX_EXCESS * MAX_CHUNK_BYTES
    length = spec.shape[cut] if is_moderate else 1
    return (*chunk[:cut], length, *chunk[cut + 1 :])
