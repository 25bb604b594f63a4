"""The Orbax handler that saves the arrays of a run as one item."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from zinf.checkpoint.save import Save
from zinf.checkpoint.share import Share, shares_of
from zinf.core.memory.residents import Residents
from zinf.core.process.jax_modes import with_own_modes


class StateHandler(ocp.AsyncCheckpointHandler):
    """Saves the arrays of a run in the folder that Orbax passes.

    On every process, Orbax calls `async_save` in the thread that called `save`, and
    waits for the future in a thread of its own. When the futures of all processes are
    done, the first process calls `finalize` and renames the folder.

    Attributes:
        last: the most recent save.
    """

    last: Save

    def __init__(self) -> None:
        self._shares: tuple[Residents, list[Share]] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="zinf-checkpoint")

    # Orbax passes only `args`, by keyword, so *args and **kwargs are left out.
    async def async_save(  # pyrefly: ignore[bad-override]
        self, directory: PathLike[str], args: "StateSave"
    ) -> list[Future[None]]:
        self._args = args
        self.last = save = self._save(Path(directory), args.residents)
        try:
            save.begin()
        except Exception as error:
            # Raise it where Orbax waits for the future. If `async_save` raised, Orbax
            # would stop halfway and the other processes would wait for this one.
            failed: Future[None] = Future()
            failed.set_exception(error)
            return [failed]
        return [self._worker.submit(with_own_modes(save.finish))]

    def save(self, directory: PathLike[str], args: "StateSave") -> None:
        self._args = args
        self.last = save = self._save(Path(directory), args.residents)
        save.begin()
        save.finish()

    def _save(self, directory: Path, residents: Residents) -> Save:
        if self._shares is None or self._shares[0] is not residents:
            self._shares = residents, shares_of(residents)
        return Save(directory, residents, self._shares[1])

    def finalize(self, directory: PathLike[str]) -> None:
        self.last.commit(self._args.scalars, self._args.data)

    def restore(self, directory: PathLike[str], args: Any) -> None:
        raise NotImplementedError("Checkpoints.restore reads without Orbax")

    def close(self) -> None:
        self._worker.shutdown()


@ocp.args.register_with_handler(StateHandler, for_save=True, for_restore=True)
@dataclass
class StateSave(ocp.args.CheckpointArgs):
    """The arguments of a save; see `write_arrays`."""

    residents: Residents
    scalars: Mapping[str, Any]
    data: Any
