"""Commits a checkpoint by one rename, with a sync before and after."""

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from orbax.checkpoint.path import atomicity

from zinf.checkpoint.incomplete import mark
from zinf.core.memory.nvme.system import sync_file, sync_folder


class DurableRename(atomicity.AtomicRenameTemporaryPath):
    """A temporary folder of Orbax with zinf's marker, synced before and after a rename.

    Orbax itself syncs nothing. After a power cut, the drive could then have the rename
    without the files, or the deletion of an older checkpoint without the new one.
    """

    async def create(self) -> Any:
        # An earlier save that failed may have left an error, which is not this one's.
        await self._forget_own_files()
        folder = await super().create()
        try:
            await asyncio.to_thread(mark, Path(folder))
        except OSError:
            # No file may come while the folder is deleted.
            await self._forget_own_files()
            # Without its marker the folder would stay for ever.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    async def _own_files(self) -> None:
        """Wait for the metadata that Orbax writes in a thread."""
        if self._checkpoint_metadata_store is not None:
            await asyncio.to_thread(self._checkpoint_metadata_store.wait_until_finished)

    async def _forget_own_files(self) -> None:
        """Wait for Orbax's metadata, and drop its errors, which come one at a time."""
        is_done = False
        while not is_done:
            with suppress(OSError):
                await self._own_files()
                is_done = True

    async def finalize(self) -> None:
        await self._own_files()
        await asyncio.to_thread(_rename, Path(self.get()), Path(self.get_final()))


def _rename(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.is_file():
            sync_file(path)
    sync_folder(source)
    os.rename(source, target)
    sync_folder(target.parent)
