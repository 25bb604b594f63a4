"""The checkpoints of one run: kept by number of steps, the newest few of them."""

import base64
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self

import jax
import orbax.checkpoint as ocp

from zinf.checkpoint.arrays import check_space
from zinf.checkpoint.blocks import held_bytes
from zinf.checkpoint.failure import failure
from zinf.checkpoint.handler import StateHandler, StateRestore, StateSave
from zinf.memory.residents import Residents
from zinf.plan import Plan

BYTES = "base64"
# Orbax gives up on a save after this; terabytes take hours on a slow drive.
TIMEOUT = timedelta(days=7)


class AbstractSaveable(Protocol):
    """What of an engine is saved."""

    pending_save: Future[None] | None
    """Waited for before any array changes."""

    @property
    def residents(self) -> Residents: ...

    @property
    def plan(self) -> Plan: ...

    def scalars(self) -> dict[str, Any]: ...

    def restore(self, directory: Path) -> None: ...


class Checkpoints:
    """Saves, keeps and restores the checkpoints of a run through Orbax.

    `directory/<step>/state` holds arrays and scalars, `directory/<step>/data` the state
    of the data iterator. A checkpoint gets that name when it is complete, so a process
    that is killed at any instant leaves the one before.

    Args:
        keep: how many to keep, the newest.
        asynchronous: save while the next step runs its forward pass. A save is waited
            for all the same if the plan leaves too little memory for its blocks, and
            if there are several processes.

    Raises:
        StorageError: the directory cannot be made.
    """

    def __init__(
        self, directory: Path | str, *, keep: int = 3, asynchronous: bool = True
    ) -> None:
        self.directory = Path(directory).absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = "Cannot make the folder of checkpoints"
            raise failure(what, self.directory, error) from error
        # Several processes read arrays, and meet in Orbax, by collectives, which have
        # to begin in one order on all: none may beside another's, nor beside a step's.
        self.asynchronous = asynchronous and jax.process_count() == 1
        self._handler = StateHandler()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                cleanup_tmp_directories=True,
                enable_async_checkpointing=self.asynchronous,
                async_options=ocp.AsyncOptions(
                    timeout_secs=int(TIMEOUT.total_seconds()),
                    create_directories_asynchronously=False,
                ),
            ),
            item_handlers={
                "state": self._handler,
                "data": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, engine: AbstractSaveable, data_state: Any = None) -> None:
        """Begin to save `engine` as it is now, after `step` steps.

        `data_state` is JSON, in which there may be bytes: where the data is read next.
        Waits for the save before it. Afterwards `engine.pending_save` tells when arrays
        may change again; errors are raised by the next `save` or `check`, or by `wait`.
        Of several processes all have to call, and the save is complete on return.

        Raises:
            ValueError: there is a checkpoint of that step.
            StorageError: the save before this one failed, or this one if it is not
                asynchronous.
        """
        released: Future[None] = Future()
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=StateSave(engine.residents, engine.scalars(), released),
                data=ocp.args.JsonSave({"state": _as_json(data_state)}),
            ),
            force=True,
        )
        engine.pending_save = released
        if not (self.asynchronous and _has_room(engine)):
            self.wait()

    def restore(self, engine: AbstractSaveable, step: int | None = None) -> Any:
        """Set `engine` to a checkpoint, the newest if `step` is None.

        Returns the state of the data iterator that was saved with it. For errors see
        `read_arrays`.
        """
        self.wait()
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=StateRestore(engine.restore),
                data=ocp.args.JsonRestore(),
            ),
        )
        return _from_json(restored["data"]["state"])

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


def _has_room(engine: AbstractSaveable) -> bool:
    """Whether a save's blocks fit beside all that a step may hold."""
    for tier, nbytes in held_bytes(engine.residents).items():
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
