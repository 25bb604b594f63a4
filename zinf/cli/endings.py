"""How a process ends after an interrupt, or when the reader of its output is gone."""

import os
import select
import sys
from typing import Never

INTERRUPTED = 130
# The exit code that a shell reports for a program that SIGPIPE (13) ended.
PIPE_CLOSED = 128 + 13
STDERR = 2


def exit_at_once(*_: object) -> Never:
    """Handler of SIGINT while nothing is open that must be closed."""
    os.write(STDERR, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def is_unread() -> bool:
    """Whether the reader of standard output is gone, as in `zinf plan ... | head`.

    If so, the rest of the output is discarded: else Python prints an error at exit.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return True
    return False


def lost_reader() -> bool:
    """Whether a BrokenPipeError means that the reader of standard output is gone.

    `is_unread` alone does not detect it with PYTHONUNBUFFERED: after the failed write
    the buffer is empty, so flushing succeeds.
    """
    if is_unread():
        return True
    if sys.platform != "win32":
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    return True  # Windows has no poll, and only a lost reader breaks a pipe.


def discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
