"""Admits one thread at a time to an engine, and sets the engine's modes of jax."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from zinf.core.process.jax_modes import Modes


class ConcurrentUseError(RuntimeError):
    """An engine was called while another call to it ran. Nothing was changed."""


class Turn:
    """Which call runs inside an engine. A second call is refused at once.

    To let it wait would hide a mistake: the order of two steps, and so the numbers,
    would change from run to run.
    """

    def __init__(self, modes: Modes) -> None:
        self._modes = modes
        self._lock = threading.Lock()
        self._holder: tuple[threading.Thread, str] | None = None

    @contextmanager
    def of(self, what: str) -> Generator[None, None, None]:
        """Hold the turn, and set the engine's jax modes, while the `with` block runs.

        Args:
            what: the name of the call, such as "step".

        Raises:
            ConcurrentUseError: another call has not returned yet.
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
        holder = self._holder  # None while a turn begins or ends
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
