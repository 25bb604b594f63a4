"""One save: links and holds the arrays at once, and writes them during training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax

from zinf.checkpoint.chunk_writer import AbstractWriter, ChunkWriter, RowsWritten
from zinf.checkpoint.grid import Index
from zinf.checkpoint.manifest import FILE, Manifest
from zinf.checkpoint.parts import Part, merged, part_name
from zinf.checkpoint.share import Share
from zinf.checkpoint.snapshot import Snapshot
from zinf.checkpoint.storage import AbstractStorage, FolderStorage
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
from zinf.core.memory.storage_error import CHECKPOINT
from zinf.core.program import ArrayId, Tier
from zinf.core.sharding import intersection, relative

Barrier = Callable[[str], None]
"""Waits until all processes have called it with the same name."""


class AbstractSave(ABC):
    """Saves this process's shares of all arrays, as they are when `begin` is called.

    Every process has a save of the same checkpoint. The processes do not wait for each
    other until all have finished; then the first one writes the manifest.

    `begin` makes hard links and copies nothing, so it is short. `finish` may run in any
    thread; when it returns, all files are synced to the drive. At a time, the host has
    at most two stripes of 16 MiB and the device at most one, counted in their ledgers;
    stripes have fewer rows if the budgets leave less. If either fails, all holds are
    released, and what is in the storage is deleted. `commit` completes the checkpoint.

    Attributes:
        released: done when no array is held any more. A fused step, which replaces all
            arrays at once, waits for it.
        held_bytes: host and device bytes that `finish` needs; known after `begin`.
    """

    # Bytes that the host has at once for each byte of a stripe that is written.
    num_copies = 1
    # Whether a chunk file can be written in several parts, from stripes of fewer rows.
    writes_parts = False

    def __init__(self, storage: AbstractStorage[Any], snapshot: Snapshot) -> None:
        self.storage = storage
        self.snapshot, self.residents = snapshot, snapshot.residents
        self.released: Future[None] = Future()
        self.part = Part()
        self.held_bytes = dict.fromkeys((Tier.HOST, Tier.DEVICE), 0)

    def begin(self) -> None:
        """Link or hold every array as it is now; check that there is room for the rest.

        Raises:
            StorageError: an array was never written, or its last write failed; a folder
                or a link cannot be made; or the drive has no room.
        """
        try:
            with CHECKPOINT.explained("Cannot begin a checkpoint", self.storage.folder):
                self.snapshot.take()
            self.storage.check_space(self.snapshot.copied_bytes)
        except BaseException:
            self.cancel()
            self.storage.clear()
            raise
        left = room(self.residents)
        left[Tier.HOST] //= self.num_copies
        if self.writes_parts:
            held = self.snapshot.held
            self.snapshot.cut(fitted(held, self.residents, left, lambda share: True))
        self.held_bytes = held_bytes(self.snapshot.held, self.residents, left)
        self.held_bytes[Tier.HOST] *= self.num_copies
        if not self.snapshot.held:
            self.released.set_result(None)

    def finish(self) -> None:
        """Write the held stripes, checksum the linked files, and sync all files.

        Raises:
            StorageError: a file cannot be written, or a linked file has other content
                than the NVMe tier wrote.
            BudgetExceeded: a tier has no room for the stripes.
        """
        try:
            writer = self._open_writer()
            try:
                self._write(writer)
                writer.sync()
            finally:
                writer.close()
            if jax.process_index():
                name = part_name(jax.process_index())
                self.storage.put(name, self.part.encoded()).result()
        except BaseException:
            self.cancel()
            self.storage.clear()
            raise
        self.cancel()

    def commit(self, scalars: Mapping[str, Any], data: Any) -> None:
        """Merge the parts of all processes and write the manifest.

        Only the first process calls this, after all processes have finished theirs.

        Raises:
            StorageError: the manifest cannot be written.
            RuntimeError: the parts differ in their grids, or a chunk is in none.
        """
        others = [part_name(process) for process in range(1, jax.process_count())]
        parts = {name: self.storage.get(name) for name in others}
        manifest = Manifest(merged(self.part, parts), dict(scalars), data)
        # The parts go first: what follows the manifest might not be done.
        self.storage.delete(others)
        self.storage.put(FILE, manifest.encoded()).result()

    def cancel(self) -> None:
        """Release all holds and delete the links that were not moved."""
        self.snapshot.drop()
        if not self.released.done():
            self.released.set_result(None)

    @abstractmethod
    def _open_writer(self) -> AbstractWriter: ...

    def _write(self, writer: AbstractWriter) -> None:
        """Write held stripes first, as updates wait for them; then linked files."""
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
        shares = self.snapshot.shares if is_first else []
        described = [(s.array, writer.describe(s.array, s.grid)) for s in shares]
        self._adopt(writer)
        for array, future in described:
            part.metadata[array] = future.result()

    def _adopt(self, writer: AbstractWriter) -> None:
        sums = [(linked, writer.adopt(linked)) for linked in self.snapshot.linked]
        for linked, future in sums:
            self.part.checksums[linked.share.array][linked.index] = future.result()

    def _streams(self, writer: AbstractWriter) -> Iterator[Transfer]:
        for stripe, share in list(self.snapshot.held.items()):
            nbytes = self.num_copies * stripe_bytes(stripe, share)
            yield nbytes, partial(self._stream, writer, share, stripe)

    def _stream(self, writer: AbstractWriter, share: Share, stripe: ArrayId) -> Finish:
        content = self.residents.read_share(stripe)
        box = share.box(stripe)
        place = share.place(stripe)
        assert place is not None
        writing: list[tuple[Index, RowsWritten]] = []
        for index in share.grid.meeting(place):
            part = intersection(share.grid.box(index), place)
            assert part is not None
            chunk = content[(*relative(part, box), ...)]
            written = writer.write(share.array, share.grid, index, chunk)
            writing.append((index, written))

        def finish() -> None:
            for index, future in writing:
                checksum = future.result()
                if checksum is not None:
                    self.part.checksums[share.array][index] = checksum
            self.snapshot.release(stripe)

        return finish


class Save(AbstractSave):
    """A save in a folder of a file system."""

    writes_parts = True

    def __init__(
        self, directory: Path, residents: Residents, shares: Sequence[Share]
    ) -> None:
        storage = FolderStorage(directory)
        super().__init__(storage, Snapshot(directory, residents, shares))
        self.directory = directory

    def _open_writer(self) -> ChunkWriter:
        return ChunkWriter(self.directory)
