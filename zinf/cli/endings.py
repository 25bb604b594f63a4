"""How a process ends after an interrupt, or when the reader of its output is gone."""

import os
import select
import sys
from contextlib import suppress
from typing import Any, Never

from zinf.core.text.complaint import complain, tell

INTERRUPTED = 130
UNWRITABLE = 2
# The exit code that a shell reports for a program that SIGPIPE (13) ended.
PIPE_CLOSED = 128 + 13
STDERR = 2


def exit_at_once(*_: object) -> Never:
    """Handler of SIGINT while nothing is open that must be closed."""
    with suppress(OSError):
        os.write(STDERR, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def open_closed_streams() -> None:
    """Give the standard streams that are closed (`zinf ... >&-`) to the null device.

    Otherwise the next files that are opened get their numbers, and what libraries print
    goes into these files.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # A file gets the lowest free number.
            setattr(sys, name, open(os.devnull, mode))


def say(text: str) -> None:
    """Print a line of a long run; if that fails, say so once and go on without."""
    try:
        tell(text)
    except OSError as error:
        discard_output()
        complain(f"{_unwritable(error)} The run goes on without it.")


def say_nothing(text: str, **_: Any) -> None: ...


def lost_output() -> int | None:
    """The exit code if standard output takes nothing more, else None.

    If so, the rest of the output is discarded: else Python prints an error at exit.
    PIPE_CLOSED: its reader is gone, as in `zinf plan ... | head`. UNWRITABLE: another
    error, which this prints.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return PIPE_CLOSED
    except OSError as error:
        discard_output()
        complain(f"{_unwritable(error)} Free space on its drive, or name another file.")
        return UNWRITABLE
    return None


def _unwritable(error: OSError) -> str:
    return f"error: Standard output cannot be written: {error.strerror or error}."


def lost_reader() -> bool:
    """Whether a BrokenPipeError means that the reader of standard output is gone.

    `lost_output` alone does not detect it with PYTHONUNBUFFERED: after the failed write
    the buffer is empty, so flushing succeeds.
    """
    if lost_output() == PIPE_CLOSED:
        return True
    if sys.platform != "win32":
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    return True  # Windows has no poll, and only a lost reader breaks a pipe.


def discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
