"""The checkpoints of a run in object storage; only the newest few are kept."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax

from zinf.checkpoint.bucket.save import ObjectSave
from zinf.checkpoint.bucket.store import Store, contents
from zinf.checkpoint.incomplete import ITEM, MARKER
from zinf.checkpoint.keeper import AbstractKeeper
from zinf.checkpoint.manifest import FILE
from zinf.checkpoint.place import ObjectFolder
from zinf.checkpoint.share import shares_of
from zinf.core.memory import StorageError
from zinf.core.memory.residents import Residents
from zinf.core.process.jax_modes import with_own_modes

MARK = b'{"written_by": "zinf"}\n'
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
        self._store = Store(folder)
        super().__init__(keep, self._store)
        self.folder, self.asynchronous = folder, asynchronous
        self._barrier = barrier
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
            raise FileExistsError(
                f"{self.folder} has a checkpoint of step {step} already."
            )
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

    def goes_on_from(self, step: int) -> None:
        self._own = [s for s in self._steps if s <= step]

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

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def _finish(
        self, step: int, save: ObjectSave, scalars: Mapping[str, Any], data: Any
    ) -> None:
        is_first = jax.process_index() == 0
        try:
            if is_first:
                self._store.put(f"{step}/{MARKER}", MARK).result()
            save.finish()
        except BaseException:
            save.cancel()
            with suppress(StorageError):
                # The marker goes last: what stays is still known as zinf's.
                if is_first and not self._store.names(f"{step}/{ITEM}/"):
                    self._store.delete([f"{step}/{MARKER}"])
            raise
        self._barrier("all of a checkpoint is written")
        if jax.process_index() == 0:
            save.commit(scalars, data)
        self._barrier("a checkpoint is complete")
        old = self._rotate(step)
        self._steps = sorted({*self._steps, step} - {*old})
        if jax.process_index() == 0:
            for number in old:
                self._delete(number, self._store.names(f"{number}/{ITEM}/"))

    def _delete(self, step: int, names: list[str]) -> None:
        manifest = f"{step}/{ITEM}/{FILE}"
        marker = f"{step}/{MARKER}"
        self._store.delete(name for name in names if name == manifest)
        self._store.delete(name for name in names if name not in (manifest, marker))
        self._store.delete([marker])

    def _delete_incomplete(self, names: list[str]) -> None:
        for step in incomplete_steps(names):
            if self._store.get(f"{step}/{MARKER}") != MARK:
                continue
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
    """Steps of the checkpoints that are only partly saved or partly deleted.

    A folder without zinf's marker, or with anything else in it, is not ours.
    """
    known = set(names)
    for step in _steps(names):
        marker, manifest = f"{step}/{MARKER}", f"{step}/{ITEM}/{FILE}"
        others = len(contents(names, str(step))) - 1
        is_ours = len(contents(names, f"{step}/{ITEM}")) == others
        if marker in known and is_ours and manifest not in known:
            yield step


def _steps(names: Sequence[str]) -> list[int]:
    first = {name.partition("/")[0] for name in names if "/" in name}
    return sorted(int(name) for name in first if name.isdecimal())
