"""A snapshot of all arrays at one moment, made without copying any of them.

[Note: instant snapshots] The NVMe tier never overwrites a chunk file that has a second
hard link: it writes a new file instead. So a hard link in the checkpoint saves the
chunk and copies no byte. Arrays on the other tiers are held: they are read while
training goes on, and only an update of the same array waits until it is read.
"""

import errno
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import jax

from zinf.checkpoint.grid import Index
from zinf.checkpoint.share import Share
from zinf.checkpoint.stripes import stripe_bytes
from zinf.core.memory import NvmeStore
from zinf.core.memory.nvme.chunk_file import ChunkFile
from zinf.core.memory.nvme.drive import Drive
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, Tier

# Error numbers of a file system that has no hard links, or no more for this file.
WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Linked:
    """A chunk file of the NVMe tier that the save has linked.

    Attributes:
        chunk: the link that the save made.
        drive: the drive to copy the file from if the checkpoint is on another file
            system or in object storage; None if the link itself is moved into the
            checkpoint.
    """

    share: Share
    index: Index
    chunk: ChunkFile
    drive: Drive | None


@dataclass
class Snapshot:
    """The links and the held stripes of one save.

    Attributes:
        directory: the folder of the checkpoint; None if it takes no links because it is
            in object storage.
        shares: this process's shares of all arrays.
        linked: linked chunk files. The links are in a folder of the checkpoint, or in a
            folder of the tier if the checkpoint is on another file system or takes no
            links.
        held: stripes that are still to be read, and the share of each.
    """

    directory: Path | None
    residents: Residents
    shares: Sequence[Share]
    linked: list[Linked] = field(default_factory=list)
    held: dict[ArrayId, Share] = field(default_factory=dict)
    _scratch: set[Path] = field(default_factory=set)
    _numbers: count = field(default_factory=count)
    _has_warned: bool = False

    @property
    def copied_bytes(self) -> int:
        """Bytes that `finish` has to write, without metadata and padding of files."""
        copies = [x.share.grid for x in self.linked if x.drive is not None]
        streamed = sum(stripe_bytes(*item) for item in self.held.items())
        return streamed + sum(grid.chunk_bytes for grid in copies)

    def take(self) -> None:
        """Link or hold every stripe. On failure, the caller must call `drop`.

        Raises:
            StorageError: an array was never written, or its last write failed.
            OSError: a folder or a link cannot be made.
        """
        if self._links is not None:
            os.mkdir(self._links)
        for share in self.shares:
            if not share.is_ours:
                continue
            for stripe in share.stripes:
                if not self._link(share, stripe):
                    self._hold(share, stripe)

    def cut(self, pieces: Mapping[ArrayId, Share]) -> None:
        """Hold the same rows in other stripes, which can be released one by one."""
        old, self.held = self.held, {}
        for piece, share in pieces.items():
            if share.place(piece) is not None:  # Padding is not saved.
                self._hold(share, piece)
        for stripe in old:
            self._end_hold(stripe)

    def release(self, stripe: ArrayId) -> None:
        """Allow updates of a held stripe again, after it was read."""
        del self.held[stripe]
        self._end_hold(stripe)

    def _end_hold(self, stripe: ArrayId) -> None:
        for tier in self._tiers(stripe):
            self.residents.stores[tier].holds.release(stripe)

    def drop(self) -> None:
        """Release all held stripes, and delete the folders of links."""
        for stripe in list(self.held):
            self.release(stripe)
        for folder in (self._links, *self._scratch):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        self._scratch.clear()

    @property
    def _links(self) -> Path | None:
        if self.directory is None:
            return None
        # One folder for all arrays: a folder for each would take longer than all links.
        return self.directory / f"links-{jax.process_index()}"

    def _tiers(self, stripe: ArrayId) -> set[Tier]:
        homes = self.residents.homes
        return {homes[piece] for piece in self.residents.homes_of(stripe)}

    def _hold(self, share: Share, stripe: ArrayId) -> None:
        for tier in self._tiers(stripe):
            self.residents.stores[tier].holds.hold([stripe])
        self.held[stripe] = share

    def _link(self, share: Share, stripe: ArrayId) -> bool:
        """Link the chunk files of a stripe; False if it must be held instead.

        A stripe can be linked if all of it is on nvme in chunks of the share's grid,
        and the file system has hard links.
        """
        if self._tiers(stripe) != {Tier.NVME}:
            return False
        store = self.residents.stores.drives
        if store.layout(stripe).chunk != share.grid.chunk:
            return False
        made: list[Linked] = []
        try:
            for name, chunk in store.chunks(stripe):
                index = share.index(name)
                # Chunks that have only padding are outside the array: skip them.
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
        if self._links is not None:
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
                self.directory or Path(error.filename).parent,
                os.strerror(error.errno or errno.EIO),
            )
