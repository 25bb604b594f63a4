"""Metrics as TensorBoard scalars."""

from itertools import count
from pathlib import Path

from tensorboardX import SummaryWriter

from zinf.observe.writer import AbstractWriter, Metrics, numbers

EVENTS = "events.out.tfevents.*"


class TensorBoard(AbstractWriter):
    """Writes each step's numbers as scalars to event files in `directory`.

    If an earlier run wrote steps after `after_step` there, TensorBoard hides them. With
    `after_step` of 0 it would hide all steps, so the files of the earlier run are moved
    to the folder `run.1` in `directory`, or the first free number. TensorBoard shows
    that folder as a run of its own.

    Attributes:
        kept: where files of an earlier run were moved to; None if there were none.
    """

    def __init__(self, directory: Path | str, *, after_step: int = 0) -> None:
        self.kept = None if after_step else _set_aside(Path(directory))
        self._events = SummaryWriter(
            logdir=str(directory),
            purge_step=after_step + 1,
            # File names have a resolution of one second: without the suffix, a run that
            # is resumed within that second would overwrite the file.
            filename_suffix=f".after-{after_step}",
            write_to_disk=True,
        )

    def write(self, metrics: Metrics) -> None:
        step = metrics["step"]
        for name, value in numbers(metrics).items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


def _set_aside(directory: Path) -> Path | None:
    found = sorted(directory.glob(EVENTS))
    if not found:
        return None
    numbered = (directory / f"run.{n}" for n in count(1))
    kept = next(each for each in numbered if not each.exists())
    kept.mkdir()
    for path in found:
        path.rename(kept / path.name)
    return kept
