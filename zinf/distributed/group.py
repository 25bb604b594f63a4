"""How one process exchanges values with the others, and how it ends with them."""

import atexit
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import jax

from zinf.core.text.complaint import shown
from zinf.distributed.hub import Hub
from zinf.distributed.limits import GRACE_SECONDS, Limits
from zinf.distributed.wire import MESSAGE_BYTES, Closed, Message, Wire

# Exit code of a process that had no error itself: another process ended the run.
ENDED_BY_ANOTHER = 3
STDERR = 2
PRINT_SECONDS = 1.0
# An error is cut to this length before it is sent to the other processes: an error of
# the compiler can contain a whole program.
FAILURE_CHARACTERS = 1 << 16


class AbstractGroup(ABC):
    """The processes of a run: they exchange small values and end together.

    As a context manager, an exception in the `with` block ends every process.
    """

    index: int
    count: int
    has_parted: bool = False
    # Whether who started the run starts it again by itself when it has saved and ended.
    goes_on_by_itself: bool = False

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether this process is to save and end, as who started the run asks.

        A training loop gives this to `any` after each step, so that all end together.
        """
        return False

    @abstractmethod
    def gather(self, name: str, value: Any, timeout: float | None = 300.0) -> list[Any]:
        """The JSON values of all processes, in process order; the same on all.

        A value has at most 16 MiB. Every process must call this, with the same name,
        within `timeout` seconds of the first call; else all processes end with an error
        that names those that did not call. With a timeout of None they may take until
        they count as hung. Calls with the same name are matched in order.
        """

    @abstractmethod
    def agree(self, values: Mapping[str, Any]) -> None:
        """End all processes, with an error that says what differs, if values differ."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Report progress. If this process dies, the error of the others quotes it."""

    def report(self, metrics: Mapping[str, Any]) -> None:  # noqa: B027
        """Give the metrics of a step to who started the run, if that is a program."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell all other processes that this process ends, and why.

        Only the first call has an effect. Call this before anything that waits for the
        other processes, such as closing files that all write. If the error is a
        consequence of another process's end, this call does not return.
        """

    @abstractmethod
    def part(self) -> None:
        """Stop watching one another; every process calls this before it ends."""

    @abstractmethod
    def close(self) -> None:
        """Call `part`, then shut down `jax.distributed` and the connections."""

    def broadcast(self, name: str, value: Any) -> Any:
        """The JSON value of process 0, the same on all processes."""
        return self.gather(name, value)[0]

    def barrier(self, name: str, timeout: float | None = 300.0) -> None:
        self.gather(name, None, timeout)

    def any(self, name: str, claim: bool, timeout: float | None = 300.0) -> bool:
        """Whether `claim` is true on at least one process; the same on all."""
        return any(self.gather(name, claim, timeout))

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which prints for all."""
        return self.index == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self.has_parted:
            self.close()
        else:
            self.fail(error)


class Alone(AbstractGroup):
    """The only process of a run."""

    index, count = 0, 1

    def gather(self, name: str, value: Any, timeout: float | None = 300.0) -> list[Any]:
        return [value]

    def agree(self, values: Mapping[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def part(self) -> None: ...

    def close(self) -> None: ...


class Joined(AbstractGroup):
    """One of several processes, connected to the hub in process 0.

    A thread listens for the end of the run. It ends this process by `os._exit`, as the
    main thread may be inside a collective that nothing can interrupt. Files are renamed
    into place when they are complete, so none is left half-written.

    Args:
        wire: A connection to the hub on which `introduce` has succeeded.
        hub: The hub if this is process 0; else None.
    """

    def __init__(
        self, wire: Wire, hub: Hub | None, *, index: int, count: int, limits: Limits
    ) -> None:
        self.index, self.count = index, count
        self._wire, self._hub, self._limits = wire, hub, limits
        self._calls: Counter[str] = Counter()
        self._results: dict[str, list[Any]] = {}
        self._came = threading.Condition()
        self._has_verdict = threading.Event()  # the verdict is this process's error
        self._is_ended = threading.Event()  # another process ended the run
        self._failure = ""
        self._first_said = "nothing"
        threading.Thread(target=self._listen, name="zinf-group", daemon=True).start()

    def gather(self, name: str, value: Any, timeout: float | None = 300.0) -> list[Any]:
        return self._give(name, value, timeout, agree=False)

    def agree(self, values: Mapping[str, Any]) -> None:
        self._give("agreement", dict(values), self._limits.join_seconds, agree=True)

    def say(self, text: str) -> None:
        self._send({"say": text})

    def fail(self, error: BaseException) -> None:
        if self._failure or self.has_parted:
            return
        self._failure = describe(error)
        # Exit handlers run in reverse order, so this one runs before jax's, which would
        # wait for the other processes and abort.
        atexit.register(leave, 1)
        self._send({"fail": self._failure[:FAILURE_CHARACTERS]})
        # Wait for the verdict. If another process caused this error, the listener ends
        # this process with that cause.
        self._has_verdict.wait(GRACE_SECONDS + self._limits.beat_seconds + 1.0)
        if self._is_ended.is_set():
            threading.Event().wait()
        if self._hub is not None:
            self._hub.wait()

    def part(self) -> None:
        if not self.has_parted:
            self._give("leave", None, None, agree=False)

    def close(self) -> None:
        self.part()
        jax.distributed.shutdown()
        self._wire.close()
        if self._hub is not None:
            self._hub.wait()

    def _give(
        self, name: str, value: Any, timeout: float | None, *, agree: bool
    ) -> list[Any]:
        self._calls[name] += 1
        number = self._calls[name]
        key = name if number == 1 else f"{name} ({number})"
        message = {"give": key, "value": value, "seconds": timeout, "agree": agree}
        self._send(message, max_bytes=MESSAGE_BYTES)
        with self._came:
            self._came.wait_for(lambda: key in self._results)
            return self._results.pop(key)

    def _send(self, message: Message, *, max_bytes: int | None = None) -> None:
        try:
            self._wire.send(message, max_bytes=max_bytes)
        except Closed:
            if not self.has_parted:
                # The listener notices the closed connection and ends this process.
                threading.Event().wait()

    def _listen(self) -> None:
        try:
            self._follow()
        except BaseException:
            # Without the listener nothing would end this process when another fails, so
            # end all processes now.
            traceback.print_exc()
            os._exit(1)

    def _follow(self) -> None:
        heard = sent = time.monotonic()
        while True:
            try:
                messages = self._wire.receive(self._limits.beat_seconds / 2)
            except (Closed, ValueError) as error:
                if not self.has_parted:
                    self._leave(self._loss(f"the connection to it closed ({error})"))
                return
            now = time.monotonic()
            if messages:
                heard = now
            elif now - heard > self._limits.silence_seconds:
                seconds = self._limits.silence_seconds
                self._leave(self._loss(f"no sign of life for {seconds:g} s"))
            if now - sent >= self._limits.beat_seconds:
                sent = now
                self._beat()
            for message in messages:
                self._hear(message)

    def _beat(self) -> None:
        try:
            self._wire.send({"beat": None})
        except Closed:
            pass  # `_follow` notices a closed connection when it reads

    def _hear(self, message: Message) -> None:
        match message:
            case {"beat": said}:
                self._first_said = said
            case {"name": name, "values": values}:
                if name == "leave":
                    self.has_parted = True
                with self._came:
                    self._results[name] = values
                    self._came.notify_all()
            case {"end": text, "failed": failed}:
                if self.index in failed:
                    self._has_verdict.set()
                else:
                    self._leave(text)

    def _loss(self, how: str) -> str:
        return (
            f"Process 0 of {self.count}, the coordinator, is lost: {how}. It last said "
            f"{self._first_said!r}."
        )

    def _leave(self, text: str) -> None:
        self._is_ended.set()
        if self._failure:
            text += f"\nHere it showed as {self._failure}"
        announce(f"[process {self.index}] error: {text}\n")
        if self._hub is not None:
            self._hub.wait()
        os._exit(ENDED_BY_ANOTHER)


def describe(error: BaseException) -> str:
    """The kind, message and notes of an error."""
    text = str(error)
    kind = type(error).__name__
    lines = [f"{kind}: {text}" if text else kind, *getattr(error, "__notes__", ())]
    return "\n".join(lines)


def leave(code: int) -> None:
    """End this process now without waiting for other threads; flushes the output."""
    announce("")
    os._exit(code)


def announce(text: str) -> None:
    """Print a text and flush earlier output, in PRINT_SECONDS at most."""
    # In a thread: another thread may be stuck in a print and hold the stream's lock.
    printing = threading.Thread(target=_print, args=(text,), daemon=True)
    printing.start()
    printing.join(PRINT_SECONDS)


def _print(text: str) -> None:
    # One write, so that lines of several processes on one terminal do not mix. Before
    # the flush, as jax's client aborts within milliseconds after it loses process 0.
    os.write(STDERR, shown(text).encode())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
