"""Signals by which schedulers and closed terminals ask a process to end."""

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from socket import socketpair

from zinf.core.text.complaint import complain

# Windows has no SIGHUP.
NAMES = ("SIGTERM", "SIGHUP")


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C asked the process to end, and the run was saved.

    Attributes:
        signum: the signal; the exit code is 128 more.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal.Signals(signum).name} asked this process to end.")
        self.signum = signum


@contextmanager
def terminations(
    ask: Callable[[int], None], *, grace_seconds: float
) -> Generator[None, None, None]:
    """Calls `ask` with the number of a signal of NAMES, in the main thread.

    `grace_seconds` after the signal the process ends with the signal's exit code,
    whatever it does then. A signal that is ignored (nohup) stays so. If the program
    handles one of them itself, as a worker of `zinf.ray` does, all are left alone. In
    other threads than the main one this does nothing.
    """
    known = signal.Signals.__members__
    numbers = [known[name] for name in NAMES if name in known]
    found = {number: signal.getsignal(number) for number in numbers}
    is_ours = all(x in (signal.SIG_DFL, signal.SIG_IGN) for x in found.values())
    handled = [number for number in numbers if found[number] is signal.SIG_DFL]
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and is_ours and handled):
        yield
        return
    is_over = threading.Event()
    read, write = socketpair()  # Windows has no pipes that do not block.
    write.setblocking(False)

    def wait() -> None:
        # Python runs a handler when its main thread runs Python, which may be long
        # after the signal. It writes the signal's number to this socket at once.
        while (number := read.recv(1)) and number[0] not in handled:
            pass
        if number and not is_over.wait(grace_seconds):
            name = signal.Signals(number[0]).name
            complain(f"Not saved {grace_seconds:g} s after {name}: ends now.")
            os._exit(128 + number[0])

    watcher = threading.Thread(target=wait, name="zinf-termination", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, lambda number, frame: ask(number))
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        is_over.set()
        write.close()
        watcher.join()
        read.close()
