"""One thread at a time inside an engine, in the engine's own modes of jax."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from zinf.jax_modes import Modes


class ConcurrentUseError(RuntimeError):
    """A call to an engine while another call to it was running; nothing was touched."""


class Turn:
    """Whose turn it is. Another caller is refused at once, and is not kept waiting.

    Waiting would hide a mistake: which of two steps comes first would change the
    numbers from run to run.
    """

    def __init__(self, modes: Modes) -> None:
        self._modes = modes
        self._lock = threading.Lock()
        self._holder: tuple[threading.Thread, str] | None = None

    @contextmanager
    def of(self, what: str) -> Generator[None, None, None]:
        """Takes the turn for the call `what`, such as "step", and runs it in the modes.

        Raises:
            ConcurrentUseError: another call has not returned.
        """
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUseError(self._refusal(what))
        self._holder = threading.current_thread(), what
        try:
            with self._modes.own():
                yield
        finally:
            self._holder = None
            self._lock.release()

    def _refusal(self, what: str) -> str:
        thread = threading.current_thread()
        holder = self._holder  # None for the instant in which it comes or goes
        inside, doing = (None, "another call") if holder is None else holder
        if inside is thread:
            return (
                f"engine.{what} was called while engine.{doing} was running in the "
                f"same thread, {thread.name!r}: from a signal handler, or from a "
                "function that the step calls. Nothing was touched. Note there that "
                f"it is due, and call engine.{what} when engine.{doing} has returned."
            )
        name = "another thread" if inside is None else f"thread {inside.name!r}"
        doing = doing if inside is None else f"engine.{doing}"
        return (
            f"engine.{what} was called in thread {thread.name!r} while {name} was "
            f"inside {doing} of the same engine. Nothing was touched. An engine is "
            "used by one thread at a time: make these calls from one thread, or hold "
            "a lock of your own around each."
        )
