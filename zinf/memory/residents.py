"""The persistent arrays of a run, addressed as wholes wherever their pieces rest."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zinf.memory.device import to_host
from zinf.memory.nvme import NvmeStore
from zinf.memory.stores import Stores
from zinf.program import ArrayId, ArraySpec, Tier


class Residents:
    """Reads and writes any rows of any persistent array, from or to its home.

    A leaf that is stacked over layers may rest in pieces, some rows here and some
    there; who asks for the leaf, or for some rows of it, does not see that.

    Args:
        specs: the spec of every array as a whole, by its id without rows.
        homes: the tier of every piece: whole arrays, or rows of them.
    """

    def __init__(
        self,
        stores: Stores,
        specs: Mapping[ArrayId, ArraySpec],
        homes: Mapping[ArrayId, Tier],
    ):
        self.stores, self.specs, self.homes = stores, dict(specs), dict(homes)
        self._pieces: dict[ArrayId, list[ArrayId]] = {}
        for piece in self.homes:
            self._pieces.setdefault(piece.whole, []).append(piece)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.rows or (0, 0))

    def create(self, rows_per_chunk: Mapping[ArrayId, int | None]) -> None:
        """Declares what rests on nvme, so that its bytes and files are spoken for."""
        for whole, pieces in self._pieces.items():
            if any(self.homes[piece] == Tier.NVME for piece in pieces):
                store = self.stores[Tier.NVME]
                assert isinstance(store, NvmeStore)
                store.create(whole, self.specs[whole], rows_per_chunk.get(whole))

    def read(self, array: ArrayId) -> np.ndarray:
        """`array` (whole, or any rows) on the host; the caller must not change it."""
        parts = [
            _on_host(self.stores[self.homes[piece]].read(wanted).result())
            for piece, wanted in self._overlaps(array)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write(self, array: ArrayId, content: np.ndarray) -> None:
        """Replaces `array` (whole, or any rows) by `content` at its home."""
        start = array.rows[0] if array.rows else 0
        for piece, wanted in self._overlaps(array):
            part = content
            if wanted != array:
                assert wanted.rows is not None
                part = content[wanted.rows[0] - start : wanted.rows[1] - start]
            self.stores[self.homes[piece]].write(wanted, part).result()

    def write_new(self, array: ArrayId, content: np.ndarray) -> None:
        """Like `write`, also for rows of an array that is not there yet.

        Rows on nvme go straight to their file; in memory the array is made first, its
        other rows without defined content until they are written in turn.
        """
        whole = array.whole
        if array.rows is not None and self._pieces[whole] == [whole]:
            store = self.stores[self.homes[whole]]
            if not isinstance(store, NvmeStore) and not store.contains(whole):
                shape = self.specs[whole].shape
                store.write(whole, np.empty(shape, content.dtype)).result()
        self.write(array, content)

    def _overlaps(self, array: ArrayId) -> Iterator[tuple[ArrayId, ArrayId]]:
        """`(piece at home, the rows of it that belong to array)`, in order."""
        pieces = self._pieces[array.whole]
        if pieces[0].rows is None:
            yield pieces[0], array
            return
        start, stop = array.rows or (0, self.specs[array.whole].shape[0])
        for piece in pieces:
            assert piece.rows is not None
            low, high = max(start, piece.rows[0]), min(stop, piece.rows[1])
            if low < high:
                yield piece, ArrayId(piece.role, piece.path, (low, high))


def _on_host(content: Any) -> np.ndarray:
    return content if isinstance(content, np.ndarray) else to_host(content)[0]
