"""Keeps the checkpoints of a run in a folder of a file system, by Orbax."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from zinf.checkpoint.arrays import check_space
from zinf.checkpoint.durable import DurableRename
from zinf.checkpoint.failure import failure
from zinf.checkpoint.handler import StateHandler, StateSave
from zinf.checkpoint.incomplete import delete_incomplete
from zinf.checkpoint.save import AbstractSave, Save
from zinf.memory.residents import Residents

ITEM = "state"
# Orbax abandons a save after this time. Terabytes take hours on a slow drive.
TIMEOUT = timedelta(days=7)


class AbstractKeeper(ABC):
    """Saves checkpoints in the background, and keeps the newest of them.

    `<folder>/<step>/state` is a checkpoint; `zinf.checkpoint.Saved` reads it.
    """

    @abstractmethod
    def save(
        self, step: int, residents: Residents, scalars: Mapping[str, Any], data: Any
    ) -> AbstractSave:
        """Wait for the save before, and begin one.

        Raises:
            ValueError: there is a checkpoint of that step.
            StorageError: the save before failed, or this one cannot begin.
        """

    @abstractmethod
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, complete or being saved."""

    @abstractmethod
    def is_saving(self) -> bool: ...

    @abstractmethod
    def wait(self) -> None:
        """Wait until the save that runs is complete; raise its error if it fails."""

    @abstractmethod
    def check_space(self, nbytes: int) -> None:
        """Raise StorageError unless there is room for so many bytes."""

    @abstractmethod
    def close(self) -> None: ...


class FolderKeeper(AbstractKeeper):
    """Orbax renames a checkpoint when all files are synced, and deletes old ones."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        asynchronous: bool,
        barrier: Callable[[str], None],
    ) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                delete_incomplete(directory)
        except OSError as error:
            what = "Cannot make the folder of checkpoints"
            raise failure(what, directory, error) from error
        # Other processes must not open a checkpoint that the first one is deleting.
        barrier("incomplete checkpoints are deleted")
        self._handler = StateHandler()
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                create=False,
                cleanup_tmp_directories=True,
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
        state = StateSave(residents, scalars, data)
        args = ocp.args.Composite(**{ITEM: state})
        self._manager.save(step, args=args, force=True)
        return self._handler.last

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def is_saving(self) -> bool:
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def check_space(self, nbytes: int) -> None:
        check_space(self.directory, nbytes)

    def close(self) -> None:
        try:
            self._manager.close()
        finally:
            self._handler.close()


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
