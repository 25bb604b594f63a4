"""Metrics as TensorBoard scalars."""

from pathlib import Path

from tensorboardX import SummaryWriter

from zinf.observe.writer import AbstractWriter, Metrics, numbers


class TensorBoard(AbstractWriter):
    """Writes each step's numbers as scalars to event files in `directory`.

    TensorBoard hides what an earlier run wrote there of steps after `after_step`.
    """

    def __init__(self, directory: Path | str, *, after_step: int = 0) -> None:
        self._events = SummaryWriter(
            logdir=str(directory), purge_step=after_step + 1, write_to_disk=True
        )

    def write(self, metrics: Metrics) -> None:
        step = metrics["step"]
        for name, value in numbers(metrics).items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()
