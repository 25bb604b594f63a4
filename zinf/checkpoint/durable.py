"""The one rename that commits a checkpoint, between two waits for the drive."""

import asyncio
import os
from pathlib import Path

from orbax.checkpoint.path import atomicity

from zinf.memory.nvme.system import sync_file, sync_folder


class DurableRename(atomicity.AtomicRenameTemporaryPath):
    """A folder that Orbax gives its name when all in it is on the drive for good.

    Orbax itself syncs nothing: after a power cut its rename could be there without what
    was renamed, or the checkpoint before be deleted and this one not be there.
    """

    async def finalize(self) -> None:
        if self._checkpoint_metadata_store is not None:
            await asyncio.to_thread(self._checkpoint_metadata_store.wait_until_finished)
        await asyncio.to_thread(_rename, Path(self.get()), Path(self.get_final()))


def _rename(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.is_file():
            sync_file(path)
    sync_folder(source)
    os.rename(source, target)
    sync_folder(target.parent)
