"""Closes what an owner held, if the owner is dropped without being closed.

[Note: closing beside] The garbage collector may run a finalizer in any thread, at any
instant: in a thread of a drive, which would then wait for itself, or in one that holds
a lock which closing needs. So closing has a thread of its own, and code that needs what
is being closed (such as the lock of a folder) waits for that thread.
"""

import os
import weakref
from collections.abc import Callable
from threading import Thread, current_thread

_CLOSING: set[Thread] = set()


def close_when_dropped(
    owner: object, close: Callable[..., None], *arguments: object
) -> weakref.finalize:
    """Have `close(*arguments)` called soon after nothing refers to `owner` any more.

    Neither `close` nor an argument may refer to `owner`. An owner that is closed
    earlier calls `detach` on the result. Nothing is closed when the process ends, nor
    in a forked child, which has neither the threads nor the locks.
    """
    process = os.getpid()
    finalizer = weakref.finalize(owner, _close_beside, process, close, *arguments)
    finalizer.atexit = False  # pyrefly: ignore
    return finalizer


def wait_for_closing() -> None:
    """Wait until everything that dropped owners held is closed."""
    for thread in _CLOSING - {current_thread()}:
        thread.join()


def _close_beside(process: int, close: Callable[..., None], *arguments: object) -> None:
    if os.getpid() != process:
        return

    def run() -> None:
        try:
            close(*arguments)
        finally:
            _CLOSING.discard(current_thread())

    thread = Thread(target=run, name="closing a dropped engine", daemon=True)
    _CLOSING.add(thread)
    thread.start()
