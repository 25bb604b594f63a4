"""One save in object storage: uploads, and the manifest as the last of them."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from xxhash import xxh3_64_intdigest

from zinf.checkpoint.bucket.store import Put, Store
from zinf.checkpoint.chunk_writer import AbstractWriter, padded
from zinf.checkpoint.grid import Grid, Index, chunk_name, folder_name
from zinf.checkpoint.place import ObjectFolder
from zinf.checkpoint.save import AbstractSave
from zinf.checkpoint.share import Share
from zinf.checkpoint.snapshot import Linked, Snapshot
from zinf.checkpoint.stripes import Finish, Transfer, counted, move
from zinf.core.memory.residents import Residents
from zinf.core.memory.zarr_format import METADATA, zarr_json
from zinf.core.program import ArrayId, Tier

# A chunk, its bytes for TensorStore, and TensorStore's copy of these.
NUM_COPIES = 3
# Linked files that are read and uploaded at once.
NUM_LINKED_AT_ONCE = 2


class Upload:
    """A chunk whose upload has begun."""

    def __init__(self, put: Put, checksum: int) -> None:
        self._put, self._checksum = put, checksum

    def result(self) -> int:
        self._put.result()
        return self._checksum


class ObjectWriter(AbstractWriter):
    """Uploads zarr arrays. What is uploaded is safe, so there is nothing to sync."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._puts: list[Put] = []

    def describe(self, array: ArrayId, grid: Grid) -> Upload:
        return self._upload(array, METADATA, zarr_json(grid.spec, grid.chunk))

    def write(
        self, array: ArrayId, grid: Grid, index: Index, content: np.ndarray
    ) -> Upload:
        whole = padded(content, grid.chunk).tobytes()
        return self._upload(array, chunk_name(index), whole)

    def adopt(self, linked: Linked) -> Upload:
        """Read a linked file in this thread, and begin to upload its content."""
        assert linked.drive is not None
        parts: list[bytes] = []
        mover = linked.drive.mover()
        linked.chunk.check(lambda part: parts.append(bytes(part)), mover, durable=False)
        name = chunk_name(linked.index)
        return self._upload(linked.share.array, name, b"".join(parts))

    def sync(self) -> None: ...

    def close(self) -> None:
        """Wait for all uploads, so that none arrives after a failed save is deleted."""
        for put in self._puts:
            put.wait()

    def _upload(self, array: ArrayId, name: str, content: bytes) -> Upload:
        put = self._store.put(f"{folder_name(array)}/{name}", content)
        self._puts.append(put)
        return Upload(put, xxh3_64_intdigest(content))


class ObjectSave(AbstractSave):
    """A save as the objects below a folder.

    Chunk files of the NVMe tier are linked beside the tier, not into the checkpoint, so
    training goes on while they are uploaded. Nothing of an older checkpoint is reused.
    """

    num_copies = NUM_COPIES

    def __init__(
        self, folder: ObjectFolder, residents: Residents, shares: Sequence[Share]
    ) -> None:
        self.store = Store(folder)
        super().__init__(self.store, Snapshot(None, residents, shares))

    def begin(self) -> None:
        super().begin()
        linked_bytes = self._linked_bytes()
        self.held_bytes[Tier.HOST] = max(self.held_bytes[Tier.HOST], linked_bytes)

    def _open_writer(self) -> ObjectWriter:
        return ObjectWriter(self.store)

    def _adopt(self, writer: AbstractWriter) -> None:
        held = {Tier.HOST: self._linked_bytes()}
        with counted(held, self.residents, "saving a checkpoint") as capacity_bytes:
            move(self._uploads(writer), capacity_bytes)

    def _uploads(self, writer: AbstractWriter) -> Iterator[Transfer]:
        for linked in self.snapshot.linked:
            nbytes = NUM_COPIES * linked.share.grid.chunk_bytes
            yield nbytes, partial(self._begin_upload, writer, linked)

    def _begin_upload(self, writer: AbstractWriter, linked: Linked) -> Finish:
        upload = writer.adopt(linked)

        def finish() -> None:
            checksum = upload.result()
            self.part.checksums[linked.share.array][linked.index] = checksum

        return finish

    def _linked_bytes(self) -> int:
        sizes = [linked.share.grid.chunk_bytes for linked in self.snapshot.linked]
        count = min(NUM_LINKED_AT_ONCE, len(sizes))
        return NUM_COPIES * count * max(sizes, default=0)
