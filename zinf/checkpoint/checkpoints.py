"""The checkpoints of one run, named by step; only the newest few are kept."""

import base64
from concurrent.futures import Future
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self

import jax
import orbax.checkpoint as ocp

from zinf.checkpoint.arrays import check_space
from zinf.checkpoint.durable import DurableRename
from zinf.checkpoint.failure import failure
from zinf.checkpoint.handler import StateHandler, StateSave
from zinf.checkpoint.incomplete import delete_incomplete
from zinf.checkpoint.parse import read_manifest
from zinf.checkpoint.save import Save
from zinf.memory.residents import Residents
from zinf.plan import Plan

ITEM = "state"
BYTES = "base64"
# Every barrier needs a unique name. All processes open the same folders in order, so
# they count alike.
OPENED = count(1)
# Orbax abandons a save after this time. Terabytes take hours on a slow drive.
TIMEOUT = timedelta(days=7)


class AbstractSaveable(Protocol):
    """The parts of an engine that a checkpoint needs."""

    @property
    def pending_save(self) -> Future[None] | None:
        """Done when the save holds no array any more. A fused step waits for it."""

    @pending_save.setter
    def pending_save(self, save: Future[None] | None) -> None: ...

    @property
    def residents(self) -> Residents: ...

    @property
    def plan(self) -> Plan: ...

    def scalars(self) -> dict[str, Any]: ...

    def restore(self, directory: Path, *, verify: bool = True) -> None: ...


class Checkpoints:
    """Saves, keeps and restores the checkpoints of a run.

    `directory/<step>/state` is a checkpoint. Orbax deletes all but the newest `keep`.
    It renames a checkpoint to `<step>` only when all files are synced to the drive. So
    if the process is killed or the power fails, the checkpoint before is still there.
    Opening the directory deletes incomplete checkpoints and logs a warning for each.

    Args:
        keep: number of checkpoints to keep.
        asynchronous: write while training goes on. `save` still waits for the write if
            the plan leaves too little memory for two stripes, or if there are several
            processes. Several processes write their shares in parallel.

    Raises:
        StorageError: the directory cannot be made, or an incomplete checkpoint cannot
            be deleted.
    """

    def __init__(
        self, directory: Path | str, *, keep: int = 3, asynchronous: bool = True
    ) -> None:
        self.directory = Path(directory).absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                delete_incomplete(self.directory)
        except OSError as error:
            what = "Cannot make the folder of checkpoints"
            raise failure(what, self.directory, error) from error
        # Other processes must not open a checkpoint that the first one is deleting.
        processes = set(range(jax.process_count()))
        name = f"zinf opens checkpoints {next(OPENED)}"
        ocp.multihost.sync_global_processes(name, processes=processes)
        # Several processes save synchronously: if one failed in the background, the
        # others would wait for it forever in theirs.
        self.asynchronous = asynchronous and jax.process_count() == 1
        self._handler = StateHandler()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                create=False,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=self.asynchronous,
                async_options=ocp.AsyncOptions(
                    timeout_secs=int(TIMEOUT.total_seconds()),
                    create_directories_asynchronously=False,
                ),
                multiprocessing_options=_meeting_place(),
                temporary_path_class=DurableRename,
            ),
            item_handlers={ITEM: self._handler},
        )

    def save(self, step: int, engine: AbstractSaveable, data_state: Any = None) -> None:
        """Begin to save `engine` as it is now, after `step` steps.

        Waits until the save before is complete. Sets `engine.pending_save`, which is
        done when a fused step may replace all arrays. An asynchronous save that fails
        raises its error from the next `save`, `check` or `wait`. If there are several
        processes, all must call `save`.

        Args:
            data_state: position of the data iterator, as JSON that may contain bytes.

        Raises:
            ValueError: there is a checkpoint of that step.
            StorageError: the save before this one failed, or this one if it is
                synchronous.
        """
        state = StateSave(engine.residents, engine.scalars(), _as_json(data_state))
        args = ocp.args.Composite(**{ITEM: state})
        self._manager.save(step, args=args, force=True)
        engine.pending_save = self._handler.last.released
        if not (self.asynchronous and _has_room(engine, self._handler.last)):
            self.wait()

    def restore(
        self, engine: AbstractSaveable, step: int | None = None, *, verify: bool = True
    ) -> Any:
        """Set `engine` to the checkpoint of `step`, or to the newest if it is None.

        Returns the state of the data iterator that was saved with the arrays. For
        `verify` and the errors see `read_arrays`.
        """
        self.wait()
        step = self.latest_step() if step is None else step
        if step is None:
            raise FileNotFoundError(f"There is no checkpoint in {self.directory}.")
        folder = self.folder(step) / ITEM
        data = _from_json(read_manifest(folder).data)
        engine.restore(folder, verify=verify)
        return data

    @property
    def last_save(self) -> Save:
        """The most recent save, with the files that it linked and copied."""
        return self._handler.last

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, complete or being saved; None if none."""
        return self._manager.latest_step()

    def folder(self, step: int) -> Path:
        return self.directory / str(step)

    def check_space(self, engine: AbstractSaveable) -> None:
        """Raise StorageError unless the drive has room for all arrays of `engine`."""
        nbytes = sum(spec.nbytes for spec in engine.residents.specs.values())
        check_space(self.directory, nbytes)

    def check(self) -> None:
        """Raise the error of a save that has ended; return at once if one runs."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until the save that runs is complete; raise its error if it fails."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        try:
            self._manager.close()
        finally:
            self._handler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _has_room(engine: AbstractSaveable, save: Save) -> bool:
    """Whether the stripes of a save fit in the budgets beside the peak of a step."""
    for tier, nbytes in save.held_bytes.items():
        capacity_bytes = engine.residents.stores[tier].ledger.capacity_bytes
        step_bytes = engine.plan.peak_bytes[tier]
        if capacity_bytes is not None and step_bytes + nbytes > capacity_bytes:
            return False
    return True


def _as_json(state: Any) -> Any:
    """`state` with every bytes object encoded as base64, since JSON has no bytes."""
    match state:
        case bytes():
            return {BYTES: base64.b64encode(state).decode()}
        case dict():
            return {key: _as_json(value) for key, value in state.items()}
    return state


def _from_json(saved: Any) -> Any:
    if not isinstance(saved, dict):
        return saved
    if saved.keys() == {BYTES}:
        return base64.b64decode(saved[BYTES])
    return {key: _from_json(value) for key, value in saved.items()}
