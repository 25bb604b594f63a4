"""What is known of an attempt to run: its events, and how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Why an attempt ended."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    RESIZED = "resized"  # there is room for more workers
    PREEMPTED = "preempted"
    LOST = "lost"  # a worker died, froze, hung, or did not come to a meeting
    FAILED = "failed"  # the function raised an error in a worker


# Causes for which all workers are asked to save and end.
STOPS = (Cause.INTERRUPTED, Cause.RESIZED, Cause.PREEMPTED)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that the function raised in a worker.

    Attributes:
        said: the worker's last progress report, such as "step 7".
        bases: names of the error's type and of all types that it derives from.
        error: the error, or one of a builtin type that it derives from; None if it was
            Ray's own.
    """

    text: str
    trace: str
    said: str
    bases: tuple[str, ...]
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the function ended in one worker: DONE, FAILED, or one of STOPS."""

    cause: Cause
    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A progress report of a worker, with the time (`time.time`) of its arrival."""

    time: float
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended.

    Attributes:
        text: what ended it, for the user; "" if the function returned.
        values: what the function returned, by worker.
    """

    cause: Cause
    text: str = ""
    failure: Failure | None = None
    values: Sequence[Any] = ()


@dataclass(slots=True)
class Attempt:
    """One attempt to run, from the placing of its workers to their end.

    Times are those of `time.time` on the driver's host.

    Attributes:
        count: number of workers.
        pids: process id of each worker that joined, by index.
        noticed: when its end was noticed; 0.0 while it runs.
    """

    number: int
    count: int
    began: float
    events: list[Event] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    noticed: float = 0.0
    ended: Ended | None = None

    def first(self, *texts: str) -> Event | None:
        """The first event whose text begins with one of these."""
        return next((e for e in self.events if e.text.startswith(texts)), None)


def seconds_to_recover(before: Attempt, after: Attempt) -> Mapping[str, float]:
    """Seconds from the notice of an attempt's end to the next attempt's first step.

    The parts are those of `zinf.Trainer`'s progress reports: until all workers have
    joined (restart), until the plan is made and its programs are compiled (compile),
    until the checkpoint is read (load), and until the first step is done (step).
    """
    marks = {
        "restart": after.first("preparing"),
        "compile": after.first("loading", "step"),
        "load": after.first("step"),
        "step": after.first("done with step"),
    }
    found, last = {}, before.noticed
    for name, event in marks.items():
        if event is not None:
            found[name], last = event.time - last, event.time
    return found
