"""Turns errors of a command into a message and an exit code."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

import typer

from zinf.cli.endings import (
    INTERRUPTED,
    PIPE_CLOSED,
    exit_at_once,
    lost_output,
    lost_reader,
)
from zinf.core.process.lazy import MissingExtra
from zinf.core.process.termination import Terminated
from zinf.core.text.complaint import complain

if TYPE_CHECKING:
    from zinf.distributed import AbstractGroup

Given = ParamSpec("Given")
DOES_NOT_FIT = DIFFERS = 1
USER_ERROR = 2
# In notes of jax and Grain, of which frames a traceback does not have.
OF_FRAMES = "has removed its internal frames"
OUTPUT_MEANT = "Look at the drive of standard output, and at that of other files."


def returning_exit_code(command: Callable[Given, int]) -> Callable[Given, int]:
    """Return the exit code with which an error ends a command; an interrupt is raised.

    So that a command for several configs goes on with the next one.
    """

    @wraps(command)
    def run(*arguments: Given.args, **named: Given.kwargs) -> int:
        try:
            return command(*arguments, **named)
        except typer.Exit as ended:
            if ended.exit_code == INTERRUPTED:
                raise
            return ended.exit_code

    return run


@contextmanager
def clean_errors(
    traceback: bool, group: "AbstractGroup | None" = None
) -> Generator[None, None, None]:
    """Prints an error that the user can fix as one message; ends with an exit code.

    A command must finish its imports before it enters this context: inside it an
    interrupt raises KeyboardInterrupt, so that open files and engines are closed.
    """
    is_one_of_several = group is not None and group.count > 1
    prefix = f"[process {group.index}] " if is_one_of_several and group else ""
    try:
        with _interruptible():
            yield
    except Terminated as error:
        complain(f"{prefix}{error}")
        raise typer.Exit(128 + error.signum) from None
    except KeyboardInterrupt:
        complain(f"{prefix}Interrupted.")
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and lost_reader():
            raise typer.Exit(PIPE_CLOSED) from None
        if isinstance(error, OSError) and error.filename is None:
            # Printing raises errors that name no file.
            code = lost_output()
            if code is not None:
                raise typer.Exit(code) from None
        if traceback or not _is_users(error):
            raise
        notes = getattr(error, "__notes__", ())
        lines = [str(error), *(note for note in notes if OF_FRAMES not in note)]
        if isinstance(error, OSError) and error.errno and error.filename is None:
            lines.append(f"The system names no file. {OUTPUT_MEANT}")
        complain(f"{prefix}error: " + "\n".join(lines))
        raise typer.Exit(_exit_code(error)) from None


@contextmanager
def _interruptible() -> Generator[None, None, None]:
    """Makes an interrupt raise KeyboardInterrupt instead of ending the process."""
    if signal.getsignal(signal.SIGINT) is not exit_at_once:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, exit_at_once)


def _is_users(error: Exception) -> bool:
    """Whether the user can fix the error, so that its message says how."""
    if isinstance(error, ValueError | OSError | NotImplementedError):
        return True
    # Late, to keep help fast [Note: late imports]. An error of these types was raised
    # by a module that is imported already.
    from zinf.core.memory import BudgetExceeded
    from zinf.core.optim.decision import NonFiniteError

    return isinstance(error, NonFiniteError | BudgetExceeded | MissingExtra)


def _exit_code(error: Exception) -> int:
    from zinf.core.plan import InfeasibleError

    return DOES_NOT_FIT if isinstance(error, InfeasibleError) else USER_ERROR
