"""How a process ends when it is interrupted, or when nobody reads its output."""

import os
import select
import sys
from typing import Never

INTERRUPTED = 130
# What a shell reports of a program that wrote to a pipe that nobody reads.
PIPE_CLOSED = 128 + 13
STDERR = 2


def exit_at_once(*_: object) -> Never:
    """Handles SIGINT while there is nothing to close."""
    os.write(STDERR, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def is_unread() -> bool:
    """Whether the reader of standard output is gone, as in `zinf plan ... | head`.

    Then what is left to write goes nowhere, so that Python does not complain at exit.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return True
    return False


def lost_reader() -> bool:
    """Like `is_unread`, after a BrokenPipeError: also if nothing is left to write.

    With PYTHONUNBUFFERED the failed write left nothing in a buffer, so flushing works.
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
