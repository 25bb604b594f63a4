"""How a command ends: exit codes, and errors as messages."""

import sys
from collections.abc import Generator
from contextlib import contextmanager

import typer

from zinf.distributed import (
    AbstractGroup,
    Alone,
)
from zinf.executor import NonFiniteError
from zinf.memory import BudgetExceeded
from zinf.plan import InfeasibleError

DOES_NOT_FIT, USER_ERROR, INTERRUPTED = 1, 2, 130
# What a user can mend, with a message that says how.
USER_ERRORS = (
    ValueError,
    OSError,
    NotImplementedError,
    NonFiniteError,
    BudgetExceeded,
)
ALONE = Alone()


@contextmanager
def clean_errors(
    traceback: bool, group: AbstractGroup = ALONE
) -> Generator[None, None, None]:
    """Prints a user's error as one message and ends with its exit code."""
    prefix = f"[process {group.index}] " if group.count > 1 else ""
    try:
        yield
    except KeyboardInterrupt:
        print(f"{prefix}Interrupted.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except USER_ERRORS as error:
        if traceback:
            raise
        lines = [str(error), *getattr(error, "__notes__", ())]
        print(f"{prefix}error:", "\n".join(lines), file=sys.stderr)
        is_infeasible = isinstance(error, InfeasibleError)
        raise typer.Exit(DOES_NOT_FIT if is_infeasible else USER_ERROR) from None
