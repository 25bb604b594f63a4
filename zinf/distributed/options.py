"""Command-line options of commands that run in several processes."""

from typing import Annotated

import typer

from zinf.distributed.limits import Limits
from zinf.distributed.seat import JoinError

PANEL = "Several processes"
# The class has slots, so its defaults can be read only from an instance.
DEFAULTS = Limits()


def _seconds(text: str) -> typer.models.OptionInfo:
    return typer.Option(min=1.0, help=f"Seconds {text}", rich_help_panel=PANEL)


Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where process 0 runs, and a free port there.",
        rich_help_panel=PANEL,
    ),
]
NumProcesses = Annotated[
    int | None, typer.Option(help="How many train together.", rich_help_panel=PANEL)
]
ProcessId = Annotated[
    int | None, typer.Option(help="Which this is, from 0.", rich_help_panel=PANEL)
]
LocalDevices = Annotated[
    str | None,
    typer.Option(
        metavar="0,1|all",
        help="The accelerators of this host that this process has. By default all, or "
        "one each where a launcher starts several on a host.",
        rich_help_panel=PANEL,
    ),
]
JoinTimeout = Annotated[float, _seconds("until all must have started.")]
SilenceTimeout = Annotated[
    float, _seconds("without a sign of life, after which a process counts as lost.")
]
HangTimeout = Annotated[
    float, _seconds("without progress, after which a process counts as hung.")
]


def device_ids(text: str | None) -> tuple[int, ...] | None:
    """ "0,1" -> (0, 1), "all" -> (), None -> None: the form that `Flags` takes.

    Raises:
        JoinError: The text is neither numbers nor "all".
    """
    if text is None or text == "all":
        return None if text is None else ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise JoinError(
            f"--local-devices is {text!r}; it must be numbers of accelerators, such as "
            "0,1, or all."
        )
    return tuple(map(int, parts))
