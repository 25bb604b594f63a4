"""Metrics as TensorBoard scalars."""

import os
import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter

# Made by protobuf, which has no types for it.
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore
from tensorboardX.summary import scalar

from zinf.observe.writer import AbstractWriter, Metrics, new_run_folder, numbers

PREFIX = "events"
EVENTS = f"{PREFIX}.out.tfevents.*"
# Each flush syncs the file, which takes milliseconds.
FLUSH_SECONDS = 120.0


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
        self.target = f"The TensorBoard events in {directory}"
        os.makedirs(directory, exist_ok=True)
        # Not `SummaryWriter`: its thread ends when a write fails, and then every call
        # waits for ever for room in its queue.
        self._events = EventsWriter(
            os.path.join(directory, PREFIX),
            # File names have a resolution of one second: without the suffix, a run that
            # is resumed within that second would overwrite the file.
            filename_suffix=f".after-{after_step}",
        )
        self._flush_at = 0.0
        begin = SessionLog(status=SessionLog.START)
        for first in ({"file_version": "brain.Event:2"}, {"session_log": begin}):
            self._add(Event(step=after_step + 1, **first))

    def write(self, metrics: Metrics) -> None:
        step = metrics["step"]
        for name, value in numbers(metrics).items():
            if name != "step" and value is not None:
                self._add(Event(step=step, summary=scalar(name, value)))
        if time.monotonic() >= self._flush_at:
            self._events.flush()
            self._flush_at = time.monotonic() + FLUSH_SECONDS

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)

    def close(self) -> None:
        self._events.close()


def _set_aside(directory: Path) -> Path | None:
    found = sorted(directory.glob(EVENTS))
    if not found:
        return None
    kept = new_run_folder(directory)
    for path in found:
        path.rename(kept / path.name)
    return kept
