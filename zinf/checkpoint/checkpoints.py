"""The checkpoints of one run: kept by number of steps, the newest few of them."""

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
# A meeting of processes needs a name of its own: one for each folder that all open.
OPENED = count(1)
# Orbax gives up on a save after this; terabytes take hours on a slow drive.
TIMEOUT = timedelta(days=7)


class AbstractSaveable(Protocol):
    """What of an engine is saved."""

    @property
    def pending_save(self) -> Future[None] | None:
        """Waited for before arrays that no store holds change."""

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

    `directory/<step>/state` is a checkpoint. Orbax keeps the newest few, and gives one
    that name when it is complete and on the drive for good; so a process that is killed
    at any instant, or a power cut, leaves the one before. What was begun and not
    completed is named in a warning, and deleted, when the directory is opened.

    Args:
        keep: how many to keep, the newest.
        asynchronous: write while training goes on. A save is waited for all the same if
            the plan leaves too little memory for its blocks, and if there are several
            processes (which write at once, each its share).

    Raises:
        StorageError: the directory cannot be made.
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
        # Nobody is to find what is being deleted.
        processes = set(range(jax.process_count()))
        name = f"zinf opens checkpoints {next(OPENED)}"
        ocp.multihost.sync_global_processes(name, processes=processes)
        # Of several processes, one whose save fails in the background would leave the
        # others waiting for it in theirs, where nothing ends them.
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

        `data_state` is JSON, in which there may be bytes: where the data is read next.
        Waits for the save before it. Afterwards `engine.pending_save` tells when arrays
        may all change at once; errors are raised by the next `save` or `check`, or by
        `wait`. Of several processes all have to call.

        Raises:
            ValueError: there is a checkpoint of that step.
            StorageError: the save before this one failed, or this one if it is not
                asynchronous.
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
        """Set `engine` to a checkpoint, the newest if `step` is None.

        Returns the state of the data iterator that was saved with it. For `verify` and
        errors see `read_arrays`.
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
        """The save that was begun last: what it linked, and what it copies."""
        return self._handler.last

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, begun or complete; None: there is none."""
        return self._manager.latest_step()

    def folder(self, step: int) -> Path:
        return self.directory / str(step)

    def check_space(self, engine: AbstractSaveable) -> None:
        """Raise StorageError unless one more checkpoint of `engine` fits."""
        nbytes = sum(spec.nbytes for spec in engine.residents.specs.values())
        check_space(self.directory, nbytes)

    def check(self) -> None:
        """Raise what went wrong with a save that has ended; wait for none."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until what was saved is complete, or raise what went wrong."""
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
    """Where several processes wait for each other: with the coordinator of the run.

    Orbax's default is a collective between devices.
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
    """Whether what a save holds fits beside all that a step may hold."""
    for tier, nbytes in save.held_bytes.items():
        capacity_bytes = engine.residents.stores[tier].ledger.capacity_bytes
        step_bytes = engine.plan.peak_bytes[tier]
        if capacity_bytes is not None and step_bytes + nbytes > capacity_bytes:
            return False
    return True


def _as_json(state: Any) -> Any:
    """`state` with its bytes, of which JSON has none, as text."""
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
