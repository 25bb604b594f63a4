"""One attempt: starts its workers, watches them, and ends them all."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from zinf.distributed import Limits
from zinf.distributed.agreement import processes
from zinf.distributed.limits import GRACE_SECONDS, TOGETHER_SECONDS
from zinf.ray.board import Member, News
from zinf.ray.cluster import draining
from zinf.ray.record import STOPS, Attempt, Cause, Ended, Failure, Outcome
from zinf.ray.worker import Post, WorkerActor

ROUND_SECONDS = 1.0
# Resources that Ray has an argument of their own for.
NAMED = ("CPU", "GPU", "memory")


@dataclass(frozen=True, slots=True)
class Listener:
    """Functions that are called while an attempt runs.

    Args:
        say: called with each line for the user.
        on_metrics: called with the metrics of each step.
    """

    say: Callable[[str], None]
    on_metrics: Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class Watch:
    """The driver's view of an attempt that runs.

    Args:
        board: the actor of the run's `Board`.
        has_more_room: whether the cluster has room for more workers now.
        check_seconds: how often it is asked.
    """

    attempt: Attempt
    board: Any
    limits: Limits
    listener: Listener
    has_more_room: Callable[[], bool]
    check_seconds: float
    workers: list[Any] = field(default_factory=list)
    runs: dict[Any, int] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    absent: str = ""
    asked: Cause | None = None
    leaving: str = ""  # which workers a node takes with it
    due: float = float("inf")  # when `lost` or `failures` ends the attempt
    check_at: float = 0.0

    def start(
        self,
        places: PlacementGroup,
        posts: list[Post],
        need: Mapping[str, float],
        function: Any,
    ) -> None:
        """Start a worker in each place."""
        ray.get(self.board.begin.remote(self.attempt.number, self.attempt.count))
        rest = {k: v for k, v in need.items() if k not in NAMED}
        for post in posts:
            where = PlacementGroupSchedulingStrategy(
                places, placement_group_bundle_index=post.index
            )
            worker = WorkerActor.options(
                num_cpus=need.get("CPU", 0),
                num_gpus=need.get("GPU", 0),
                memory=need.get("memory"),
                resources=rest,
                scheduling_strategy=where,
            ).remote()
            self.workers.append(worker)
            self.runs[worker.run.remote(post, self.board, function)] = post.index

    def until_end(self) -> Ended:
        """Watch until the attempt has ended, and end all of its workers.

        A KeyboardInterrupt asks the workers to save and end; the second is raised.
        """
        self.check_at = time.monotonic() + self.check_seconds
        try:
            while True:
                try:
                    ended = self._round()
                except KeyboardInterrupt:
                    if self.asked is Cause.INTERRUPTED:
                        raise
                    self.ask(Cause.INTERRUPTED)
                    self.listener.say(
                        "Interrupted: this step will be completed and saved. Interrupt "
                        "again to stop at once, without saving."
                    )
                    continue
                if ended is not None:
                    self.attempt.noticed = time.time()
                    # Read the messages from just before the end.
                    self._hear(ray.get(self.board.news.remote()))
                    self.attempt.ended = ended
                    return ended
        finally:
            self.kill()

    def ask(self, cause: Cause) -> None:
        """Ask the workers to save and end."""
        self.asked = cause
        ray.get(self.board.ask.remote(cause))

    def kill(self) -> None:
        """End all workers; one that is stopped takes Ray five seconds."""
        for worker in self.workers:
            ray.kill(worker)

    def _round(self) -> Ended | None:
        news = self.board.news.remote()
        pending = [news, *self.runs]
        ready, _ = ray.wait(pending, num_returns=1, timeout=ROUND_SECONDS)
        # All calls that are ready beside the first one, without waiting.
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        for run in ready:
            if run in self.runs:
                self._came(self.runs.pop(run), run)
        self._hear(ray.get(news))
        now = time.monotonic()
        self._find_lost()
        if self.asked is None:
            self._check_nodes(now)
        return self._verdict(now)

    def _check_nodes(self, now: float) -> None:
        """Ask the workers to save and end if nodes are about to leave, or have come."""
        leaving = draining()
        told = [i for i, member in self.members.items() if member.node in leaving]
        if told:
            self.leaving = f"{self._names(told)} told to leave, with the node."
            self.ask(Cause.PREEMPTED)
        elif now > self.check_at:
            self.check_at = now + self.check_seconds
            if self.has_more_room():
                self.ask(Cause.RESIZED)

    def _came(self, index: int, run: Any) -> None:
        """A worker's call has ended, or the worker itself."""
        try:
            outcome = ray.get(run)
        except ray.exceptions.RayTaskError as error:
            # The function did not reach the worker, or its value cannot come back.
            said = self._said(index)
            failure = Failure(_first_line(error), str(error), said, _bases(error), None)
            outcome = Outcome(Cause.FAILED, failure=failure)
        except ray.exceptions.RayError as error:
            self._lose(index, _why(error))
            return
        self.outcomes[index] = outcome
        if outcome.failure is not None:
            self._fail(index, outcome.failure)

    def _hear(self, news: News) -> None:
        for line in news.lines:
            self.listener.say(line)
        for metrics in news.metrics:
            self.listener.on_metrics(metrics)
        self.attempt.events += news.events
        self.members |= news.members
        self.attempt.pids |= {i: member.pid for i, member in news.members.items()}
        self.absent = news.absent
        for index, failure in news.failures.items():
            self._fail(index, failure)

    def _lose(self, index: int, how: str) -> None:
        self.lost.setdefault(index, how)
        self.due = min(self.due, time.monotonic() + TOGETHER_SECONDS)

    def _fail(self, index: int, failure: Failure) -> None:
        self.failures.setdefault(index, failure)
        self.due = min(self.due, time.monotonic() + GRACE_SECONDS)

    def _find_lost(self) -> None:
        """Find workers that are silent, late or hung."""
        limits, count = self.limits, self.attempt.count
        running = {i: m for i, m in self.members.items() if i in self.runs.values()}
        for index, member in running.items():
            if member.heard > limits.silence_seconds:
                self._lose(index, f"no sign of life for {limits.silence_seconds:g} s")
        missing = set(range(count)) - self.members.keys() - self.outcomes.keys()
        if missing and time.time() - self.attempt.began > limits.join_seconds:
            for index in missing:
                self._lose(index, f"it did not join within {limits.join_seconds:g} s")
        if any(m.said_at > limits.hang_seconds for m in running.values()):
            least = min(member.num_words for member in running.values())
            for index, member in running.items():
                if member.num_words == least:
                    how = f"no progress for {limits.hang_seconds:g} s (--hang-timeout)"
                    self._lose(index, how)

    def _verdict(self, now: float) -> Ended | None:
        count = self.attempt.count
        if len(self.outcomes) == count and not self.failures:
            return self._all_ended()
        if self.absent and not self.lost:
            return Ended(Cause.LOST, self.absent)
        if now < self.due:
            return None
        if self.lost:
            return self._some_lost()
        index, failure = next(iter(self.failures.items()))
        who = f"Worker {index} of {count}{self._place(index)} failed"
        return Ended(Cause.FAILED, f"{who}: {failure.text}", failure)

    def _all_ended(self) -> Ended:
        causes = {outcome.cause for outcome in self.outcomes.values()}
        if causes == {Cause.DONE}:
            values = [self.outcomes[i].value for i in range(self.attempt.count)]
            return Ended(Cause.DONE, values=values)
        if Cause.PREEMPTED in causes:
            if self.leaving:
                return Ended(Cause.PREEMPTED, self.leaving)
            told = [i for i, o in self.outcomes.items() if o.cause is Cause.PREEMPTED]
            return Ended(Cause.PREEMPTED, f"{self._names(told)} told to leave.")
        cause = self.asked or next(cause for cause in causes if cause in STOPS)
        texts = {
            Cause.RESIZED: "There is room for more workers.",
            Cause.INTERRUPTED: "Interrupted.",
        }
        return Ended(cause, texts.get(cause, ""))

    def _some_lost(self) -> Ended:
        first = min(self.lost)
        said = f"It last said {self._said(first)!r}."
        text = f"{self._names(list(self.lost))} lost: {self.lost[first]}"
        leaving = [i for i in self.lost if i in self.members and self._is_leaving(i)]
        if leaving or self.leaving:
            late = "after it was told to leave"
            return Ended(Cause.PREEMPTED, f"{text}, {late}{self._place(first)}. {said}")
        return Ended(Cause.LOST, f"{text}{self._place(first)}. {said}")

    def _names(self, indices: list[int]) -> str:
        names = processes(indices).replace("process", "worker").capitalize()
        verb = "were" if len(indices) > 1 else "was"
        return f"{names} of {self.attempt.count} {verb}"

    def _is_leaving(self, index: int) -> bool:
        return self.members[index].is_leaving

    def _place(self, index: int) -> str:
        member = self.members.get(index)
        return "" if member is None else f" (host {member.host}, pid {member.pid})"

    def _said(self, index: int) -> str:
        return self.members[index].said if index in self.members else "nothing"


def _why(error: ray.exceptions.RayError) -> str:
    """Why Ray says that an actor ended, in its first sentence about it."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "Ray cannot reach it"
    found = re.search(r"The actor is dead because (.*?)(?:\. |[.]?\n|$)", str(error))
    return found.group(1) if found else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _bases(error: BaseException) -> tuple[str, ...]:
    return tuple(base.__name__ for base in type(error).__mro__)
