"""The arrays as they are at one moment, taken in the time that links take.

[Note: instant snapshots] A chunk file of the NVMe tier that has a second name is never
changed again: the tier writes a new file. So giving it a name in the checkpoint is
saving it, and no byte is copied. What rests elsewhere is held: it is read while
training goes on, and an update of it, of that array alone, waits until it is read.
"""

import errno
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import jax

from zinf.checkpoint.blocks import block_bytes
from zinf.checkpoint.grid import Index
from zinf.checkpoint.share import Share
from zinf.memory import NvmeStore
from zinf.memory.nvme.chunk_file import ChunkFile
from zinf.memory.nvme.drive import Drive
from zinf.memory.residents import Residents
from zinf.program import ArrayId, Tier

# What a file system answers that has no hard links, or no more of this file.
WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Linked:
    """A chunk file that has a name of the save's own.

    Attributes:
        drive: what moves its bytes, if it has to be copied: the checkpoint is on
            another file system.
    """

    share: Share
    index: Index
    chunk: ChunkFile
    drive: Drive | None


@dataclass
class Snapshot:
    """Attributes:
    shares: of all arrays.
    linked: chunk files with a name in a folder `links` of the checkpoint, or in one of
        the tier.
    held: blocks that are still to be read, and whose they are.
    """

    directory: Path
    residents: Residents
    shares: Sequence[Share]
    linked: list[Linked] = field(default_factory=list)
    held: dict[ArrayId, Share] = field(default_factory=dict)
    _scratch: set[Path] = field(default_factory=set)
    _numbers: count = field(default_factory=count)
    _has_warned: bool = False

    @property
    def copied_bytes(self) -> int:
        """What has to be written, beside metadata and what pads files."""
        copies = [x.share.grid for x in self.linked if x.drive is not None]
        streamed = sum(block_bytes(*item) for item in self.held.items())
        return streamed + sum(grid.chunk_bytes for grid in copies)

    def take(self) -> None:
        """Link and hold everything. On failure, `drop` undoes what was done.

        Raises:
            StorageError: an array was never written, or its last write failed.
            OSError: a folder or a link cannot be made.
        """
        os.mkdir(self._links)
        for share in self.shares:
            if not share.is_ours:
                continue
            for block in share.blocks:
                if not self._link(share, block):
                    self._hold(share, block)

    def release(self, block: ArrayId) -> None:
        """Let a held block, which was read, change again."""
        del self.held[block]
        for tier in self._tiers(block):
            self.residents.stores[tier].holds.release(block)

    def drop(self) -> None:
        """Let go of everything that is still held, and of links outside."""
        for block in list(self.held):
            self.release(block)
        for folder in (self._links, *self._scratch):
            shutil.rmtree(folder, ignore_errors=True)
        self._scratch.clear()

    @property
    def _links(self) -> Path:
        # One folder for all: making those of the arrays takes longer than all links.
        return self.directory / f"links-{jax.process_index()}"

    def _tiers(self, block: ArrayId) -> set[Tier]:
        homes = self.residents.homes
        return {homes[piece] for piece in self.residents.homes_of(block)}

    def _hold(self, share: Share, block: ArrayId) -> None:
        for tier in self._tiers(block):
            self.residents.stores[tier].holds.hold([block])
        self.held[block] = share

    def _link(self, share: Share, block: ArrayId) -> bool:
        """Whether the block rests on nvme, in such files, and all could be linked."""
        if self._tiers(block) != {Tier.NVME}:
            return False
        store = self.residents.stores[Tier.NVME]
        assert isinstance(store, NvmeStore)
        if store.layout(block).chunk != share.grid.chunk:
            return False
        made: list[Linked] = []
        try:
            for name, chunk in store.chunks(block):
                index = share.index(name)
                # Chunks of nothing but padding have no place in the array.
                inside = zip(index, share.grid.counts, strict=True)
                if all(place < number for place, number in inside):
                    made.append(self._link_chunk(store, share, index, chunk))
        except OSError as error:
            for linked in made:
                linked.chunk.path.unlink()
            if error.errno not in WITHOUT_LINKS or error.filename is None:
                raise
            self._warn(error)
            return False
        self.linked += made
        return True

    def _link_chunk(
        self, store: NvmeStore, share: Share, index: Index, chunk: ChunkFile
    ) -> Linked:
        name = str(next(self._numbers))
        try:
            return Linked(share, index, chunk.link_to(self._links / name), None)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        scratch = store.scratch(chunk, f"saving-{os.getpid()}-{id(self):x}")
        if scratch not in self._scratch:
            with suppress(FileExistsError):
                scratch.mkdir(mode=0o700)
            self._scratch.add(scratch)
        linked = chunk.link_to(scratch / name)
        return Linked(share, index, linked, store.drive(chunk))

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Arrays on nvme are copied into checkpoints, and updates of them wait "
                "for that, as %s takes no hard link: %s.",
                self.directory,
                os.strerror(error.errno or errno.EIO),
            )
