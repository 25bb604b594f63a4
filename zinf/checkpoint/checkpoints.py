"""The checkpoints of one run, named by step; only the newest few are kept."""

import base64
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self

import jax
import orbax.checkpoint as ocp

from zinf.checkpoint.bucket.keeper import ObjectKeeper
from zinf.checkpoint.incomplete import ITEM
from zinf.checkpoint.keeper import AbstractKeeper, FolderKeeper
from zinf.checkpoint.place import ObjectFolder, Place, as_place
from zinf.checkpoint.save import AbstractSave
from zinf.checkpoint.saved import Saved
from zinf.core.memory.residents import Residents
from zinf.core.plan import Plan

BYTES = "base64"
# Every barrier needs a unique name. All processes open the same folders in order, and
# save to them in order, so they count alike.
MEETINGS = count(1)


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

    def restore(self, directory: Any, *, verify: bool = True) -> None: ...


class Checkpoints:
    """Saves, keeps and restores the checkpoints of a run.

    `directory/<step>/state` is a checkpoint. Of those of this run, all but the newest
    `keep` and the best are deleted: of those that it saved, and those up to the one
    that it restored. Nothing else in the directory is deleted, also not by its name. A
    checkpoint counts only when all of it is safe: Orbax renames its folder when all
    files are synced to the drive, and in object storage the manifest comes last. So if
    the process is killed or the power fails, the checkpoint before is still there.
    Opening the directory deletes incomplete checkpoints that carry zinf's marker, and
    logs a warning for each.

    Args:
        directory: a folder, or a URL: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or
            file:///FOLDER (a folder without hard links or renames, such as a mounted
            bucket).
        keep: number of checkpoints to keep.
        asynchronous: write while training goes on. `save` still waits for the write if
            the plan leaves too little memory for two stripes, or if there are several
            processes. Several processes write their shares in parallel.

    Raises:
        StorageError: the directory cannot be made, an incomplete checkpoint cannot be
            deleted, or the storage cannot be reached.
        ValueError: the URL is of another kind.
    """

    def __init__(
        self,
        directory: Path | str | ObjectFolder,
        *,
        keep: int = 3,
        asynchronous: bool = True,
    ) -> None:
        place = self.directory = as_place(directory)
        # Several processes save synchronously: if one failed in the background, the
        # others would wait for it forever in theirs.
        self.asynchronous = asynchronous and jax.process_count() == 1
        policy = {"keep": keep, "asynchronous": self.asynchronous, "barrier": _meet}
        self._keeper: AbstractKeeper = (
            ObjectKeeper(place, **policy)
            if isinstance(place, ObjectFolder)
            else FolderKeeper(place, **policy)
        )
        self._last: AbstractSave | None = None

    def save(self, step: int, engine: AbstractSaveable, data_state: Any = None) -> None:
        """Begin to save `engine` as it is now, after `step` steps.

        Waits until the save before is complete. Sets `engine.pending_save`, which is
        done when a fused step may replace all arrays. An asynchronous save that fails
        raises its error from the next `save`, `check` or `wait`. If there are several
        processes, all must call `save`.

        Args:
            data_state: position of the data iterator, as JSON that may contain bytes.

        Raises:
            FileExistsError: there is a checkpoint of that step.
            StorageError: the save before this one failed, or this one if it is
                synchronous.
        """
        data = _as_json(data_state)
        save = self._keeper.save(step, engine.residents, engine.scalars(), data)
        self._last, engine.pending_save = save, save.released
        if not (self.asynchronous and _has_room(engine, save)):
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
        with Saved(folder) as saved:
            data = _from_json(saved.data)
        engine.restore(folder, verify=verify)
        self._keeper.goes_on_from(step)
        return data

    @property
    def last_save(self) -> AbstractSave:
        """The most recent save, with the files that it linked and copied."""
        assert self._last is not None, "nothing was saved yet"
        return self._last

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of `step`, saved or about to be, whatever comes later.

        The one that was named before is again like the others, once this one is
        complete.
        """
        self._keeper.keep_best(step)

    @property
    def best_step(self) -> int | None:
        """The step that `keep_best` was given last; None if it was not called."""
        return self._keeper.best_step

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, complete or being saved; None if none."""
        return self._keeper.latest_step()

    def folder(self, step: int) -> Place:
        return self.directory / str(step)

    def check_space(self, engine: AbstractSaveable) -> None:
        """Raise StorageError unless the drive has room for all arrays of `engine`."""
        nbytes = sum(spec.nbytes for spec in engine.residents.specs.values())
        self._keeper.storage.check_space(nbytes)

    def check_names(self, engine: AbstractSaveable, last_step: int) -> None:
        """Raise StorageError if the drive takes no name as long as an array's."""
        self._keeper.storage.check_names(str(last_step), engine.residents.specs)

    def check(self) -> None:
        """Raise the error of a save that has ended; return at once if one runs."""
        if not self._keeper.is_saving():
            self.wait()

    def wait(self) -> None:
        """Wait until the save that runs is complete; raise its error if it fails."""
        self._keeper.wait()

    def close(self) -> None:
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _meet(name: str) -> None:
    """Wait until all processes have come to the same point."""
    processes = set(range(jax.process_count()))
    key = f"zinf, checkpoints: {name} ({next(MEETINGS)})"
    ocp.multihost.sync_global_processes(key, processes=processes)


def _has_room(engine: AbstractSaveable, save: AbstractSave) -> bool:
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
