"""Keeps the checkpoints of a run in a folder of a file system, by Orbax."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from zinf.checkpoint.durable import DurableRename
from zinf.checkpoint.handler import StateHandler, StateSave
from zinf.checkpoint.incomplete import (
    ITEM,
    complete_steps,
    delete,
    delete_incomplete,
    marker_of,
)
from zinf.checkpoint.save import AbstractSave, Save
from zinf.checkpoint.storage import AbstractStorage, FolderStorage
from zinf.core.memory.residents import Residents
from zinf.core.memory.storage_error import CHECKPOINT

# Orbax abandons a save after this time. Terabytes take hours on a slow drive.
TIMEOUT = timedelta(days=7)

logger = logging.getLogger(__name__)


class AbstractKeeper(ABC):
    """Saves checkpoints in the background; keeps the newest of them, and the best.

    `<folder>/<step>/state` is a checkpoint; `zinf.checkpoint.Saved` reads it.

    Attributes:
        keep: number of the newest checkpoints to keep.
        storage: the folder of all checkpoints.
    """

    def __init__(self, keep: int, storage: AbstractStorage[Any]) -> None:
        self.keep, self.storage = keep, storage
        self._own: list[int] = []
        self._best: list[int] = []

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of `step` too, in place of the best one before.

        If it is not complete yet, the one before is kept until it is.
        """
        self._best = [*self._best, step] if step not in self._own else [step]

    @property
    def best_step(self) -> int | None:
        """The step that was named best last; None if none was."""
        return self._best[-1] if self._best else None

    def _rotate(self, step: int) -> list[int]:
        """Count a checkpoint that is complete; returns those to delete now."""
        self._own.append(step)
        if step in self._best:
            self._best = [step]
        kept = {*self._own[-self.keep :], *self._best}
        old = [s for s in self._own if s not in kept]
        self._own = [s for s in self._own if s in kept]
        return old

    @abstractmethod
    def save(
        self, step: int, residents: Residents, scalars: Mapping[str, Any], data: Any
    ) -> AbstractSave:
        """Wait for the save before, and begin one.

        Raises:
            FileExistsError: there is a checkpoint of that step.
            StorageError: the save before failed, or this one cannot begin.
        """

    @abstractmethod
    def goes_on_from(self, step: int) -> None:
        """Count the checkpoints up to one that was restored as those of this run."""

    @abstractmethod
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, complete or being saved."""

    @abstractmethod
    def is_saving(self) -> bool: ...

    @abstractmethod
    def wait(self) -> None:
        """Wait until the save that runs is complete; raise its error if it fails."""

    @abstractmethod
    def close(self) -> None: ...


class FolderKeeper(AbstractKeeper):
    """Orbax renames a checkpoint when all files are synced.

    Old checkpoints are deleted when a newer one is complete: those of this run alone,
    which are the ones that it saved, and those up to the one that it went on from.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        asynchronous: bool,
        barrier: Callable[[str], None],
    ) -> None:
        super().__init__(keep, FolderStorage(directory))
        self.directory = directory
        self._saving: int | None = None
        with CHECKPOINT.explained("Cannot make the folder of checkpoints", directory):
            directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                delete_incomplete(directory)
        # Other processes must not open a checkpoint that the first one is deleting.
        barrier("incomplete checkpoints are deleted")
        self._handler = StateHandler()
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                # Orbax deletes neither old checkpoints nor unfinished ones here: it
                # takes every folder named by a number for a checkpoint.
                create=False,
                cleanup_tmp_directories=False,
                enable_async_checkpointing=asynchronous,
                async_options=ocp.AsyncOptions(
                    timeout_secs=int(TIMEOUT.total_seconds()),
                    create_directories_asynchronously=False,
                ),
                multiprocessing_options=_meeting_place(),
                temporary_path_class=DurableRename,
            ),
            item_handlers={ITEM: self._handler},
        )

    def save(
        self, step: int, residents: Residents, scalars: Mapping[str, Any], data: Any
    ) -> Save:
        self.wait()
        folder = self.directory / str(step)
        if os.path.exists(folder):
            what = "a checkpoint of" if (folder / ITEM).exists() else "a folder for"
            raise FileExistsError(
                f"{self.directory} has {what} step {step} already. Save the run in a "
                "folder of its own."
            )
        state = StateSave(residents, scalars, data)
        args = ocp.args.Composite(**{ITEM: state})
        self._saving = step
        with self._failing_clean():
            self._manager.save(step, args=args, force=True)
        return self._handler.last

    def goes_on_from(self, step: int) -> None:
        self._own = [s for s in complete_steps(self.directory) if s <= step]

    def latest_step(self) -> int | None:
        under_way = [] if self._saving is None else [self._saving]
        return max([*complete_steps(self.directory), *under_way], default=None)

    def is_saving(self) -> bool:
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        with self._failing_clean():
            self._manager.wait_until_finished()
        if self._saving is None:
            return
        old = self._rotate(self._saving)
        self._saving = None
        if jax.process_index() == 0:
            for step in old:
                folder = self.directory / str(step)
                if folder.is_dir() and marker_of(folder) is not None:
                    _delete_old(folder)

    @contextmanager
    def _failing_clean(self) -> Generator[None, None, None]:
        """If the save fails, delete what it wrote, and raise OSErrors with advice."""
        try:
            # Orbax, too, writes files: of its own metadata.
            with CHECKPOINT.explained("Cannot save a checkpoint", self.directory):
                yield
        except BaseException:
            self._saving = None
            if jax.process_index() == 0:
                with suppress(OSError):
                    delete_incomplete(self.directory)
            raise

    def close(self) -> None:
        try:
            try:
                self.wait()
            finally:
                self._manager.close()
        finally:
            self._handler.close()


def _delete_old(folder: Path) -> None:
    """Delete a checkpoint; warn if that fails, as the newer one is safe already."""
    try:
        delete(folder)
    except OSError as error:
        logger.warning(
            "%s cannot be deleted: %s. Delete it yourself if it is to go.",
            folder,
            error,
        )


def _meeting_place() -> ocp.options.MultiprocessingOptions:
    """Options that make Orbax wait for other processes through JAX's coordinator.

    By default Orbax runs a collective between devices instead.
    """
    num_processes = jax.process_count()
    if num_processes == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        primary_host=0,
        active_processes=set(range(num_processes)),
        barrier_sync_key_prefix="zinf",
    )
