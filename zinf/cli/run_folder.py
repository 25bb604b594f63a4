"""The folder of a run: for one run at a time, and for the same one when it resumes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zinf.cli.changes import Changed, check_changed, told
from zinf.cli.places import has_any, place_of_checkpoints
from zinf.cli.task import task_of
from zinf.core.config import Config
from zinf.core.config.deciding import deciding
from zinf.core.memory.lock_file import lock_beside, lock_of_folder, locked
from zinf.distributed import AbstractGroup
from zinf.observe.record import RUN, read_record

# A group that restarts by itself may begin before all of the last attempt has ended.
RESTART_SECONDS = 60.0


@contextmanager
def held_run(config: Config, group: AbstractGroup) -> Iterator[None]:
    """Keep other runs from writing where the run of a config does.

    The first process of a group has a lock on `run.output`, on the folder of
    checkpoints and on the file of metrics. Checkpoints in object storage have none.

    Raises:
        StorageError: another run writes to one of them; the message says which.
    """
    if not group.is_first:
        yield
        return
    output, metrics = config.run.output, config.run.metrics
    locks = {output: lock_of_folder(output)}
    beside = [place_of_checkpoints(config), *([] if metrics is None else [metrics])]
    for path in beside:
        if isinstance(path, Path):
            locks[path] = lock_beside(path.absolute())
    with locked(
        locks,
        change="name another folder in run.output, run.checkpoints and run.metrics",
        patience_seconds=RESTART_SECONDS if group.goes_on_by_itself else 0.0,
    ):
        yield


def check_places(config: Config) -> None:
    """Refuse a run that would write among the arrays of its own NVMe tier.

    Raises:
        ValueError: see above; the next engine would refuse that folder.
    """
    named = {
        "run.output": config.run.output,
        "checkpoints": place_of_checkpoints(config),
    }
    for key, place in named.items():
        for nvme in config.nvme_paths:
            arrays = nvme.absolute() / "arrays"
            if isinstance(place, Path) and place.absolute().is_relative_to(arrays):
                raise ValueError(
                    f"{key} is {place}, in the folder of arrays of "
                    f"memory.nvme, {arrays}, which zinf deletes. Name a folder outside."
                )


def decides(config: Config) -> dict[str, Any]:
    """The settings and the content of files that decide the numbers of a run.

    They are compared when it resumes.
    """
    return deciding(config) | task_of(config).digests()


def check_resumed(
    config: Config,
    now: dict[str, Any],
    allowed: Sequence[str],
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], Changed]:
    """The recorded changes of the run that is resumed, and what changes now.

    Args:
        now: what `decides` gives.
        allowed: keys that may differ.

    Raises:
        ValueError: others differ; the message names each with its values.
    """
    output = config.run.output
    if not (config.run.resume and has_any(place_of_checkpoints(config))):
        return [], {}
    record = read_record(output) if (output / RUN).is_file() else None
    if record is None or record.decides is None:
        say(
            f"note: {output} has no {RUN} that says what its run is made of, so this "
            "config is not compared with it."
        )
        return [], {}
    changed = check_changed(
        record.decides,
        now,
        allowed,
        what=f"the run in {output}",
        instead="begin another run (run.resume=false)",
    )
    if changed:
        say(f"Goes on with other settings: {told(changed)}.")
    return record.changes, changed
