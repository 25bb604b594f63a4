"""The workers of an attempt as a group: they meet at the board."""

import contextlib
import os
import pickle
import queue
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import ray

from zinf.distributed import AbstractGroup, JoinError, Limits
from zinf.distributed.group import FAILURE_CHARACTERS, describe
from zinf.ray.board import Message, Said, unlike
from zinf.ray.record import Cause, Failure


class RayGroup(AbstractGroup):
    """One of the workers of an attempt.

    The driver ends all workers of an attempt by killing their processes. A call that
    can have no result therefore waits to be killed.

    Args:
        board: the actor of the run's `Board`.
        attempt: number of the attempt, from 0.

    Attributes:
        asked: why this worker is to save and end; None while it is not asked to.
    """

    goes_on_by_itself = True

    def __init__(
        self, board: Any, *, attempt: int, index: int, count: int, limits: Limits
    ) -> None:
        self.index, self.count, self.attempt = index, count, attempt
        self.asked: Cause | None = None
        self._board, self._limits = board, limits
        self._calls: Counter[str] = Counter()
        self._said = "nothing"
        self._has_failed = False
        self._outbox: queue.Queue[Message] = queue.Queue()

    def join(self) -> None:
        """Tell the board of this worker, and give signs of life from now on."""
        context = ray.get_runtime_context()
        host = ray.util.get_node_ip_address()
        place = os.getpid(), host, context.get_node_id()
        ray.get(self._board.join.remote(self.attempt, self.index, place))
        threading.Thread(target=self._live, name="zinf-ray", daemon=True).start()

    @property
    def is_asked_to_stop(self) -> bool:
        return self.asked is not None

    def gather(self, name: str, value: Any, timeout: float | None = 300.0) -> list[Any]:
        self._calls[name] += 1
        number = self._calls[name]
        key = name if number == 1 else f"{name} ({number})"
        given = self.attempt, self.index, key, value, timeout
        values = ray.get(self._board.gather.remote(*given))
        if values is None:
            threading.Event().wait()
        return values

    def agree(self, values: Mapping[str, Any]) -> None:
        found = self.gather("agreement", dict(values), self._limits.join_seconds)
        text = unlike(found)
        if text:
            raise JoinError(text)

    def say(self, text: str) -> None:
        self._said = text
        self._outbox.put(Said(text))

    def report(self, metrics: Mapping[str, Any]) -> None:
        if self.is_first:
            self._outbox.put(dict(metrics))

    def tell(self, line: str) -> None:
        """Let the driver print a line."""
        self._outbox.put(line)

    def flush(self) -> None:
        """Wait until the board has received all messages."""
        self._outbox.join()

    def has_passed(self, name: str) -> bool:
        """Whether all workers came to the first meeting `name`, in any attempt."""
        return ray.get(self._board.has_passed.remote(name))

    def fail(self, error: BaseException) -> None:
        if self._has_failed or self.has_parted:
            return
        self._has_failed = True
        failure = failure_of(error, self._said)
        ray.get(self._board.fail.remote(self.attempt, self.index, failure))

    @property
    def last_said(self) -> str:
        """The text of the last `say`."""
        return self._said

    def part(self) -> None:
        if not self.has_parted:
            self.gather("leave", None, None)
            self.has_parted = True

    def close(self) -> None:
        self.part()
        if self.count > 1:
            jax.distributed.shutdown()

    def _live(self) -> None:
        """Post messages in order, and at least every `beat_seconds` an empty post."""
        while True:
            messages = self._taken()
            is_leaving = self.asked is Cause.PREEMPTED
            given = self.attempt, self.index, messages, is_leaving
            asked = ray.get(self._board.post.remote(*given))
            # A worker that was itself told to leave keeps that cause.
            self.asked = self.asked or asked
            for _ in messages:
                self._outbox.task_done()

    def _taken(self) -> list[Message]:
        """All messages that wait; waits `beat_seconds` for the first."""
        messages = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._outbox.get(timeout=self._limits.beat_seconds))
            while True:
                messages.append(self._outbox.get_nowait())
        return messages


def failure_of(error: BaseException, said: str) -> Failure:
    """A `Failure` that describes an error to the driver."""
    trace = "".join(traceback.format_exception(error))
    bases = tuple(base.__name__ for base in type(error).__mro__)
    text = describe(error)[:FAILURE_CHARACTERS]
    return Failure(text, trace, said, bases, _picklable(error))


def _picklable(error: BaseException) -> BaseException:
    """The error, or one of a type of Python's own that it derives from.

    Many errors cannot be pickled, as when they are not made from their text alone.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever their classes do
        bases = type(error).__mro__
        base = next(base for base in bases if base.__module__ == "builtins")
        return base(str(error))
    return error
