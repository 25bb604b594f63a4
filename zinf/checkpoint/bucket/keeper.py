"""The checkpoints of a run in object storage; only the newest few are kept."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from zinf.checkpoint.bucket.save import ObjectSave, commit
from zinf.checkpoint.bucket.store import Store, contents
from zinf.checkpoint.keeper import ITEM, AbstractKeeper
from zinf.checkpoint.manifest import FILE
from zinf.checkpoint.place import ObjectFolder
from zinf.checkpoint.share import shares_of
from zinf.jax_modes import with_own_modes
from zinf.memory.residents import Residents

logger = logging.getLogger(__name__)


class ObjectKeeper(AbstractKeeper):
    """Saves and deletes checkpoints below a folder.

    A checkpoint is complete when its manifest is there, which is uploaded last and
    deleted first.
    """

    def __init__(
        self,
        folder: ObjectFolder,
        *,
        keep: int,
        asynchronous: bool,
        barrier: Callable[[str], None],
    ) -> None:
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self._barrier = barrier
        self._store = Store(folder)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="zinf-checkpoint")
        self._saving: tuple[int, Future[None]] | None = None
        names = self._store.names(is_first=True)
        self._steps = [step for step, _ in complete(folder, names) if step is not None]
        if jax.process_index() == 0:
            self._delete_incomplete(names)
        barrier("incomplete checkpoints are deleted")

    def save(
        self, step: int, residents: Residents, scalars: Mapping[str, Any], data: Any
    ) -> ObjectSave:
        self.wait()
        if step in self._steps:
            raise ValueError(f"{self.folder} has a checkpoint of step {step} already.")
        place = self.folder / str(step) / ITEM
        save = ObjectSave(place, residents, shares_of(residents))
        save.begin()
        run = with_own_modes(self._finish)
        if self.asynchronous:
            future = self._worker.submit(run, step, save, scalars, data)
            self._saving = step, future
        else:
            run(step, save, scalars, data)
        return save

    def latest_step(self) -> int | None:
        under_way = [] if self._saving is None else [self._saving[0]]
        return max([*self._steps, *under_way], default=None)

    def is_saving(self) -> bool:
        return self._saving is not None and not self._saving[1].done()

    def wait(self) -> None:
        if self._saving is not None:
            _, future = self._saving
            try:
                future.result()
            finally:
                self._saving = None

    def check_space(self, nbytes: int) -> None:
        """There is no limit to ask for."""

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def _finish(
        self, step: int, save: ObjectSave, scalars: Mapping[str, Any], data: Any
    ) -> None:
        try:
            save.finish()
        except BaseException:
            save.remove()
            raise
        self._barrier("all of a checkpoint is written")
        if jax.process_index() == 0:
            commit(save, scalars, data)
        self._barrier("a checkpoint is complete")
        self._steps = sorted([*self._steps, step])
        old, self._steps = self._steps[: -self.keep], self._steps[-self.keep :]
        if jax.process_index() == 0:
            for number in old:
                self._delete(number, self._store.names(f"{number}/{ITEM}/"))

    def _delete(self, step: int, names: list[str]) -> None:
        manifest = f"{step}/{ITEM}/{FILE}"
        self._store.delete(name for name in names if name == manifest)
        self._store.delete(name for name in names if name != manifest)

    def _delete_incomplete(self, names: list[str]) -> None:
        for step in incomplete_steps(names):
            logger.warning(
                "%s is a checkpoint whose saving or deleting was cut short; it is "
                "deleted.",
                self.folder / str(step),
            )
            self._delete(step, contents(names, str(step)))


def complete(
    folder: ObjectFolder, names: Sequence[str]
) -> Iterator[tuple[int | None, ObjectFolder]]:
    """`(step, folder of the manifest)` of each complete checkpoint, by step.

    Args:
        folder: of several checkpoints, of a step, or of the manifest itself.
        names: of all objects below it.
    """
    if FILE in names:
        yield None, folder
    elif f"{ITEM}/{FILE}" in names:
        step = int(folder.name) if folder.name.isdecimal() else None
        yield step, folder / ITEM
    else:
        for step in _steps(names):
            if f"{step}/{ITEM}/{FILE}" in names:
                yield step, folder / str(step) / ITEM


def incomplete_steps(names: Sequence[str]) -> Iterator[int]:
    """Steps of the checkpoints that are only partly saved or partly deleted."""
    for step in _steps(names):
        # A folder with anything else in it is not ours.
        is_ours = len(contents(names, f"{step}/{ITEM}")) == len(
            contents(names, str(step))
        )
        if is_ours and f"{step}/{ITEM}/{FILE}" not in names:
            yield step


def _steps(names: Sequence[str]) -> list[int]:
    first = {name.partition("/")[0] for name in names if "/" in name}
    return sorted(int(name) for name in first if name.isdecimal())
