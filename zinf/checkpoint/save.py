"""One save: begun in a moment, and finished beside training."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import jax

from zinf.checkpoint.blocks import (
    Finish,
    Transfer,
    block_bytes,
    counted,
    held_bytes,
    move,
)
from zinf.checkpoint.chunk_writer import ChunkWriter
from zinf.checkpoint.grid import Index
from zinf.checkpoint.parts import Part
from zinf.checkpoint.share import Share
from zinf.checkpoint.snapshot import Snapshot
from zinf.memory.residents import Residents
from zinf.program import ArrayId, Tier
from zinf.sharding import relative


class Save:
    """Writes this process's shares of all arrays of a moment into a folder.

    Every process has one for the same folder, and none needs another until all have
    finished; then the first writes the manifest (`commit`).

    `begin` takes the time of the links. After `finish`, in whatever thread, all files
    are on the drive for good. At most two blocks of 16 MiB are on the host at a time,
    and one on the device, counted in their ledgers. What fails leaves nothing held.

    Attributes:
        released: done when nothing is held any more: arrays of a fused step, which are
            replaced all at once, may change then.
        held_bytes: what `finish` needs of the host and of a device, once begun.
    """

    def __init__(
        self, directory: Path, residents: Residents, shares: Sequence[Share]
    ) -> None:
        self.directory, self.residents = directory, residents
        self.released: Future[None] = Future()
        self.snapshot = Snapshot(directory, residents, shares)
        self.part = Part()
        self.held_bytes = dict.fromkeys((Tier.HOST, Tier.DEVICE), 0)

    def begin(self) -> None:
        """Take the arrays as they are now.

        Raises:
            StorageError: an array was never written, or its last write failed.
            OSError: a folder or a link cannot be made.
        """
        try:
            self.snapshot.take()
        except BaseException:
            self.cancel()
            raise
        self.held_bytes = held_bytes(self.snapshot.held, self.residents)
        if not self.snapshot.held:
            self.released.set_result(None)

    def finish(self) -> None:
        """Write what is not linked, sum what has no sum, and wait for the drive.

        Raises:
            StorageError: a file cannot be written, or is not what the tier wrote.
            BudgetExceeded: a tier has no room for the blocks.
        """
        try:
            writer = ChunkWriter(self.directory)
            try:
                self._write(writer)
                writer.sync()
            finally:
                writer.close()
            if jax.process_index():
                self.part.write(self.directory, jax.process_index())
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Let go of everything."""
        self.snapshot.drop()
        if not self.released.done():
            self.released.set_result(None)

    def _write(self, writer: ChunkWriter) -> None:
        """First what others wait for: blocks that are held; then all the rest."""
        part, is_first = self.part, jax.process_index() == 0
        for share in self.snapshot.shares:
            part.grids[share.array] = share.grid
            part.checksums[share.array] = {}
        with counted(
            self.held_bytes, self.residents, "saving a checkpoint"
        ) as capacity_bytes:
            move(self._streams(writer), capacity_bytes)
        if not self.released.done():
            self.released.set_result(None)
        sums = [(linked, writer.adopt(linked)) for linked in self.snapshot.linked]
        shares = self.snapshot.shares if is_first else []
        described = [(s.array, writer.describe(s.array, s.grid)) for s in shares]
        for linked, future in sums:
            part.checksums[linked.share.array][linked.index] = future.result()
        for array, future in described:
            part.metadata[array] = future.result()

    def _streams(self, writer: ChunkWriter) -> Iterator[Transfer]:
        for block, share in list(self.snapshot.held.items()):
            nbytes = block_bytes(block, share)
            yield nbytes, partial(self._stream, writer, share, block)

    def _stream(self, writer: ChunkWriter, share: Share, block: ArrayId) -> Finish:
        content = self.residents.read_share(block)
        box = share.box(block)
        place = share.place(block)
        assert place is not None
        writing: list[tuple[Index, Future[int]]] = []
        for index in share.grid.meeting(place):
            chunk = content[(*relative(share.grid.box(index), box), ...)]
            writing.append((index, writer.write(share.array, share.grid, index, chunk)))

        def finish() -> None:
            for index, future in writing:
                self.part.checksums[share.array][index] = future.result()
            self.snapshot.release(block)

        return finish
