"""zinf's arrays as an item that Orbax saves, commits and restores."""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from zinf.checkpoint.arrays import write_arrays
from zinf.memory.residents import Residents


class StateHandler(ocp.AsyncCheckpointHandler):
    """Streams the arrays of a run to and from the folder that Orbax names.

    Orbax calls `async_save` in the thread that saves and waits for the future in one
    of its own; the folder gets its final name when all items in it are complete.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="zinf-checkpoint")

    # Orbax itself only ever passes `args`, by keyword.
    async def async_save(  # pyrefly: ignore[bad-override]
        self, directory: PathLike[str], args: "StateSave"
    ) -> list[Future[None]]:
        saving = self._worker.submit(_save, Path(directory), args)
        # The error is Orbax's to raise: who waits for the arrays only wants them free.
        saving.add_done_callback(lambda _: args.released.set_result(None))
        return [saving]

    def save(self, directory: PathLike[str], args: "StateSave") -> None:
        try:
            _save(Path(directory), args)
        finally:
            args.released.set_result(None)

    def restore(self, directory: PathLike[str], args: "StateRestore") -> None:
        args.read(Path(directory))

    def close(self) -> None:
        self._worker.shutdown()


def _save(directory: Path, args: "StateSave") -> None:
    try:
        write_arrays(directory, args.residents, args.scalars)
    except BaseException:
        # Orbax would leave it until the next run, perhaps on a drive that is full.
        shutil.rmtree(directory, ignore_errors=True)
        raise


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclass
class StateSave(ocp.args.CheckpointArgs):
    """What to save; see `write_arrays`. `released` is done when arrays may change."""

    residents: Residents
    scalars: Mapping[str, Any]
    released: Future[None]


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclass
class StateRestore(ocp.args.CheckpointArgs):
    """What to restore: `read` takes all state from a folder (see `read_arrays`)."""

    read: Callable[[Path], None]
