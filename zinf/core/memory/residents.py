"""The persistent arrays of a run, addressed as wholes wherever their pieces rest."""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from zinf.core.memory.device import DeviceStore, donatable
from zinf.core.memory.shares import (
    gathered,
    in_device_form,
    to_devices,
    to_part_of_share,
    to_shares,
)
from zinf.core.memory.stores import Stores
from zinf.core.program import ArrayId, Tier
from zinf.core.sharding import Layouts


class Residents:
    """Reads and writes any rows of any persistent array, from or to its home.

    A leaf stacked over layers may be kept in pieces, each with some of its rows, on
    different tiers. Callers read and write the leaf, or any rows of it, without knowing
    the pieces.

    With several processes, each keeps its share of every array. `read` gathers the
    shares, so all processes must read the same arrays in the same order. `write` gets
    the whole array in every process, and each keeps its share of it.

    Args:
        layouts: the table of the arrays as wholes.
        homes: the tier of every piece: whole arrays, or rows of them.

    Attributes:
        specs: the spec of every array as a whole.
    """

    def __init__(self, stores: Stores, layouts: Layouts, homes: Mapping[ArrayId, Tier]):
        self.stores, self.layouts, self.homes = stores, layouts, dict(homes)
        self.specs = layouts.specs
        self._pieces: dict[ArrayId, list[ArrayId]] = {}
        for piece in self.homes:
            self._pieces.setdefault(piece.whole, []).append(piece)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.rows or (0, 0))

    def create(self, rows_per_chunk: Mapping[ArrayId, int | None]) -> None:
        """Creates the arrays of tiers with files, which reserves their bytes."""
        for whole, pieces in self._pieces.items():
            cut = self.layouts.of(whole).cut_dims
            rows = rows_per_chunk.get(whole)
            share = self.layouts.share(whole)
            for tier in dict.fromkeys(self.homes[piece] for piece in pieces):
                self.stores[tier].create(whole, share, rows, cut_dims=cut)

    def read(self, array: ArrayId) -> np.ndarray:
        """`array` (whole, or any rows) on the host; the caller must not change it."""
        if array.rows and not self.layouts.of(array.whole).has_whole_rows:
            return self.read(array.whole)[slice(*array.rows)]
        parts = [
            gathered(self._share(piece, wanted), self.layouts.of(wanted))
            for piece, wanted in self._overlaps(array)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write(self, array: ArrayId, content: np.ndarray) -> None:
        """Replaces `array` (whole, or any rows) with `content` at its home."""
        _finish(self._begin(array, content))

    def pieces(self, whole: ArrayId) -> list[ArrayId]:
        """The pieces that an array is kept in, in order: itself, or rows of it."""
        return self._pieces[whole]

    def homes_of(self, array: ArrayId) -> list[ArrayId]:
        """The pieces that hold any part of `array` (whole, or any rows), in order."""
        return [piece for piece, _ in self._overlaps(array)]

    def read_share(self, array: ArrayId) -> np.ndarray:
        """This process's share of an array, or rows of the share, on the host.

        Row numbers count in the share. No other process has to call it. It may be
        called during a step while the array is held (`Holds`). The caller must not
        change the result.
        """
        parts = [self._share_rows(*pair) for pair in self._overlaps(array)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write_share(self, array: ArrayId, content: np.ndarray) -> None:
        """Replaces this process's share of an array, or rows of the share.

        If an array is sharded by rows over several devices, only the whole share can be
        written. Writing it is a collective: all processes must write the same arrays in
        the same order.
        """
        for piece, wanted, part in self._parts(array, content):
            self._begin_share(piece, wanted, part).result()

    def _share_rows(self, piece: ArrayId, wanted: ArrayId) -> np.ndarray:
        store = self.stores[self.homes[piece]]
        if self.homes[piece] != Tier.DEVICE:
            return store.read(wanted).result()
        layout = self.layouts.of(piece)
        box = layout.box
        if wanted.rows is not None:
            start = box[0][0] - (piece.rows[0] if piece.rows else 0)
            rows = (wanted.rows[0] + start, wanted.rows[1] + start)
            box = (rows, *box[1:])
        return to_part_of_share(store.read(piece).result(), layout, box)

    def write_new(self, array: ArrayId, content: np.ndarray) -> None:
        """Like `write`, but accepts rows of an array that does not exist yet.

        Rows on a tier with files go straight to their file. In memory the whole array
        is made first; its other rows are undefined until they are written.
        """
        _finish(self.begin_write_new(array, content))

    def begin_write_new(
        self, array: ArrayId, content: np.ndarray
    ) -> list[Future[None]]:
        """Like `write_new`, but does not wait for drives: the futures do.

        `content` must not change until all are done. Meanwhile the caller may write
        other arrays, and other rows of this one.
        """
        whole = array.whole
        if array.rows is not None and self._pieces[whole] == [whole]:
            home = self.homes[whole]
            if not self.stores[home].contains(whole):
                shape = self.layouts.of(whole).share_shape
                fresh = np.empty(shape, content.dtype)
                self._begin_share(whole, whole, fresh).result()
        return self._begin(array, content)

    def rows_per_chunk(self, whole: ArrayId) -> int:
        """Rows of an array that its tiers write without reading their neighbours.

        Such rows start and stop at multiples of that number.
        """
        homes = {self.homes[piece] for piece in self._pieces[whole]}
        return max(self.stores[tier].rows_per_chunk(whole) for tier in homes)

    def unwritten_bytes(self, tier: Tier) -> int:
        """Bytes that the ledger of a tier in memory will count once all is written."""
        return sum(
            self.layouts.share(piece).nbytes
            for piece, home in self.homes.items()
            if home == tier and not self.stores[tier].contains(piece)
        )

    def _begin(self, array: ArrayId, content: np.ndarray) -> list[Future[None]]:
        if array.rows and not self.layouts.of(array.whole).has_whole_rows:
            self._write_cut_rows(array, content)
            return []
        begun: list[Future[None]] = []
        try:
            for piece, wanted, part in self._parts(array, content):
                share = self.layouts.of(wanted).take_share(part)
                begun.append(self._begin_share(piece, wanted, share))
        except BaseException:
            wait(begun)
            raise
        return begun

    def _write_cut_rows(self, array: ArrayId, content: np.ndarray) -> None:
        """Writes those rows that this process keeps of an array sharded by rows.

        A process that keeps none of them writes its share too, because writing to the
        devices is a collective.
        """
        whole = array.whole
        assert array.rows is not None and self._pieces[whole] == [whole]
        share = np.array(self._share(whole, whole))
        (first, last), *_ = self.layouts.of(whole).box
        start, stop = max(array.rows[0], first), min(array.rows[1], last)
        if start < stop:
            part = content[start - array.rows[0] : stop - array.rows[0]]
            share[start - first : stop - first] = part
        self._begin_share(whole, whole, share).result()

    def _share(self, piece: ArrayId, wanted: ArrayId) -> np.ndarray:
        """This process's share of some rows of a piece, on the host."""
        content = self.stores[self.homes[piece]].read(wanted).result()
        if isinstance(content, np.ndarray):
            return content
        return to_shares([content], [self.layouts.of(wanted)])[0]

    def _begin_share(
        self, piece: ArrayId, wanted: ArrayId, share: np.ndarray
    ) -> Future[None]:
        tier = self.homes[piece]
        self.stores.device.forget_rows(piece.path)
        content: np.ndarray | jax.Array = share
        if tier == Tier.DEVICE:
            layout = self.layouts.of(wanted)
            content = in_device_form(to_devices([share], [layout])[0], layout)
            content = donatable(content)
            content = as_rows_rest(self.stores.device, wanted, content, self.layouts)
        return self.stores[tier].write(wanted, content)

    def _parts(
        self, array: ArrayId, content: np.ndarray
    ) -> Iterator[tuple[ArrayId, ArrayId, np.ndarray]]:
        """`_overlaps(array)`, each with its rows of `content`."""
        start = array.rows[0] if array.rows else 0
        for piece, wanted in self._overlaps(array):
            part = content
            if wanted != array:
                assert wanted.rows is not None
                part = content[wanted.rows[0] - start : wanted.rows[1] - start]
            yield piece, wanted, part

    def _overlaps(self, array: ArrayId) -> Iterator[tuple[ArrayId, ArrayId]]:
        """`(piece, the rows of it that belong to array)`, in order."""
        pieces = self._pieces[array.whole]
        if pieces[0].rows is None:
            yield pieces[0], array
            return
        start, stop = array.rows or (0, self.specs[array.whole].shape[0])
        # Arrays in pieces are not sharded by rows: row numbers are those of the share.
        for piece in pieces:
            assert piece.rows is not None
            low, high = max(start, piece.rows[0]), min(stop, piece.rows[1])
            if low < high:
                yield piece, piece.piece((low, high))


def as_rows_rest(
    device: DeviceStore, array: ArrayId, content: Any, layouts: Layouts
) -> Any:
    """The content of an array, in the form of the whole if that is kept on the devices.

    Only if groups hold the array ([Note: parts of all groups]): its two forms then have
    their columns in another order. The whole is brought to its device form.
    """
    if array.rows is None or not device.keeps_whole_of(array):
        return content
    layout, whole = layouts.of(array), array.whole
    if layout.num_groups == 1:
        return content
    kept = device.read(whole).result()
    formed = in_device_form(kept, layouts.of(whole))
    if formed is not kept:
        device.write(whole, formed).result()
    return in_device_form(content, layout)


def _finish(begun: Collection[Future[None]]) -> None:
    """Wait for all writes, and raise the error of the first that failed."""
    wait(begun)
    for future in begun:
        future.result()
