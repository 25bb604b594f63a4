"""Signals that ask a run to save and end, taken between two steps."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from zinf.core.process.termination import terminations

STDERR = 2
TERMINATED = """
{name}: this step will be completed and saved, if that takes at most {seconds:g} s.
"""
INTERRUPTED = b"""
Interrupted: this step will be completed and saved. Interrupt again to stop at once,
without saving.
"""


class Asked(threading.Event):
    """Set when the run is to save and end, by Ctrl-C or by the signal `signum`."""

    signum: int | None = None


@contextmanager
def interrupts(grace_seconds: float) -> Generator[Asked, None, None]:
    """Yields an event that the first Ctrl-C sets; KeyboardInterrupt is not raised.

    SIGTERM and SIGHUP set it too, for `grace_seconds` at most.

    If it were raised between a batch and its step, the data would be one batch ahead of
    the engine. Only the main thread gets signals; in other threads this does nothing.
    """
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(signum: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, previous)
        # Not print(): the signal may have interrupted a print, which is not reentrant.
        with suppress(OSError):
            os.write(STDERR, INTERRUPTED)

    def ask_to_end(signum: int) -> None:
        asked.signum = asked.signum or signum
        asked.set()
        name = signal.Signals(signum).name
        with suppress(OSError):
            os.write(
                STDERR, TERMINATED.format(name=name, seconds=grace_seconds).encode()
            )

    previous = signal.signal(signal.SIGINT, ask)
    try:
        with terminations(ask_to_end, grace_seconds=grace_seconds):
            yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
