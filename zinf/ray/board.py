"""An actor that all workers of a run report to: the meeting place of one attempt.

Every method takes the number of the attempt. What comes from the workers of an earlier
attempt, which are about to be killed, is dropped.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from zinf.distributed.agreement import differences, processes
from zinf.ray.record import Cause, Event, Failure

# A call of `news` is answered after this time if nothing happened.
NEWS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Said:
    """A worker's progress report."""

    text: str


# A line for the user, a progress report, or the metrics of a step.
Message = str | Said | Mapping[str, Any]


@dataclass(slots=True)
class Member:
    """What the board knows of one worker. Times are those of `time.monotonic`."""

    pid: int
    host: str
    node: str
    heard: float
    said: str = "nothing"
    said_at: float = 0.0
    num_words: int = 0
    is_leaving: bool = False


@dataclass(slots=True)
class News:
    """What happened since the driver last asked, and how long workers are silent.

    Attributes:
        lines: text for the user, in order.
        metrics: those of each step, of worker 0.
        members: by index; `heard` and `said_at` are ages, in seconds.
        failures: errors of workers, the first one first.
        absent: what is wrong with a meeting, if it is.
    """

    lines: list[str] = field(default_factory=list)
    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    absent: str = ""


@dataclass(slots=True)
class Meeting:
    """The values of a gather for which some workers have not given theirs."""

    given: dict[int, Any] = field(default_factory=dict)
    is_complete: asyncio.Event = field(default_factory=asyncio.Event)


class Board:
    """Keeps what workers say until the driver reads it, and exchanges their values."""

    def __init__(self) -> None:
        self._attempt, self._count = -1, 0
        self._asked: Cause | None = None
        self._members: dict[int, Member] = {}
        self._meetings: dict[str, Meeting] = {}
        self._news, self._has_news = News(), asyncio.Event()
        self._passed: set[str] = set()

    async def begin(self, attempt: int, count: int) -> None:
        """Forget the attempt before, but for the names of its meetings."""
        self._attempt, self._count, self._asked = attempt, count, None
        self._members, self._meetings = {}, {}
        self._news = News(lines=self._news.lines, metrics=self._news.metrics)

    async def join(self, attempt: int, index: int, place: tuple[int, str, str]) -> None:
        """Note that a worker has started.

        Args:
            place: its process id, host, and node of Ray.
        """
        if attempt == self._attempt:
            now = time.monotonic()
            self._members[index] = Member(*place, heard=now, said_at=now)
            self._has_news.set()

    async def post(
        self, attempt: int, index: int, messages: Sequence[Message], is_leaving: bool
    ) -> Cause | None:
        """Take a worker's messages, maybe none: a post is also a sign of life.

        Args:
            is_leaving: the worker itself was told to leave.

        Returns:
            Why the worker is asked to save and end, if it is.
        """
        if attempt != self._attempt:
            return None
        member = self._members[index]
        member.heard, member.is_leaving = time.monotonic(), is_leaving
        for message in messages:
            match message:
                case str(line):
                    self._news.lines.append(line)
                case Said(text):
                    member.said, member.said_at = text, time.monotonic()
                    member.num_words += 1
                    self._news.events.append(Event(time.time(), index, text))
                case metrics:
                    self._news.metrics.append(metrics)
                    done = f"done with step {metrics.get('step')}"
                    self._news.events.append(Event(time.time(), index, done))
        if messages:
            self._has_news.set()
        return self._asked

    async def fail(self, attempt: int, index: int, failure: Failure) -> None:
        if attempt == self._attempt:
            self._news.failures[index] = failure
            self._has_news.set()

    async def gather(
        self, attempt: int, index: int, name: str, value: Any, timeout: float | None
    ) -> list[Any] | None:
        """The values of all workers in their order; None if some did not come."""
        if attempt != self._attempt:
            return None
        meeting = self._meetings.setdefault(name, Meeting())
        meeting.given[index] = value
        if len(meeting.given) == self._count:
            del self._meetings[name]
            self._passed.add(name)
            meeting.is_complete.set()
        try:
            await asyncio.wait_for(meeting.is_complete.wait(), timeout)
        except TimeoutError:
            if attempt == self._attempt:
                self._miss(name, meeting)
            return None
        return [meeting.given[i] for i in range(len(meeting.given))]

    def _miss(self, name: str, meeting: Meeting) -> None:
        absent = sorted(set(range(self._count)) - meeting.given.keys())
        said = {i: m.said for i, m in self._members.items() if i in absent}
        self._news.absent = (
            f"{processes(absent).capitalize()} of {self._count} did not come to "
            f"{name!r}, where the others waited. They last said {said}."
        )
        self._has_news.set()

    async def has_passed(self, name: str) -> bool:
        """Whether all workers of some attempt came to the meeting of this name."""
        return name in self._passed

    async def ask(self, cause: Cause) -> None:
        """Ask all workers to save and end; they hear of it when they next post."""
        self._asked = cause

    async def news(self) -> News:
        """What happened since the last call; waits a little if nothing did."""
        try:
            await asyncio.wait_for(self._has_news.wait(), NEWS_SECONDS)
        except TimeoutError:
            pass
        self._has_news.clear()
        now, found = time.monotonic(), self._news
        for index, member in self._members.items():
            heard, said_at = now - member.heard, now - member.said_at
            found.members[index] = replace(member, heard=heard, said_at=said_at)
        self._news = News(absent=found.absent)
        return found


def unlike(values: list[dict[str, Any]]) -> str:
    """How the values of the workers differ, as text; "" if they do not."""
    found = differences(values)
    return f"The workers are not alike, so none goes on:\n{found}" if found else ""


BoardActor = ray.remote(num_cpus=0, max_restarts=0)(Board)
