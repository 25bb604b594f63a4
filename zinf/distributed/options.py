"""Command-line options of commands that run in several processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from zinf.distributed.launch import Flags
from zinf.distributed.limits import Limits
from zinf.distributed.seat import JoinError

# The class has slots, so its defaults can be read only from an instance.
DEFAULTS = Limits()


def _seconds(text: str) -> typer.models.OptionInfo:
    return typer.Option(min=1.0, help=f"Seconds {text}")


Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Where process 0 runs, and a free port there."
    ),
]
NumProcesses = Annotated[int | None, typer.Option(help="How many train together.")]
ProcessId = Annotated[int | None, typer.Option(help="Which this is, from 0.")]
LocalDevices = Annotated[
    str | None,
    typer.Option(
        metavar="0,1|all",
        help="The accelerators of this host that this process has. By default all, or "
        "one each where a launcher starts several on a host.",
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


@dataclass(frozen=True)
class Place:
    """What the options say of this process among several, and of the run's limits."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    local_devices: str | None
    limits: Limits

    def flags(self) -> Flags:
        """Raises JoinError; see `device_ids`."""
        devices = device_ids(self.local_devices)
        return Flags(self.coordinator, self.num_processes, self.process_id, devices)


_PLACES: dict[str, tuple[Any, Any]] = {
    "coordinator": (Coordinator, None),
    "num_processes": (NumProcesses, None),
    "process_id": (ProcessId, None),
    "local_devices": (LocalDevices, None),
    "join_timeout": (JoinTimeout, DEFAULTS.join_seconds),
    "silence_timeout": (SilenceTimeout, DEFAULTS.silence_seconds),
    "hang_timeout": (HangTimeout, DEFAULTS.hang_seconds),
}
TIMEOUTS = ("join", "silence", "hang")


def in_place_of(
    argument: str, options: Mapping[str, tuple[Any, Any]], make: Callable[..., Any]
) -> Callable[[Callable], Callable]:
    """A decorator that gives a command options in place of a keyword argument.

    Args:
        options: annotations and defaults by name.
        make: the argument, given the values of the options by name.
    """

    def decorate(command: Callable) -> Callable:
        @wraps(command)
        def placed(*args: Any, **named: Any) -> Any:
            values = {name: named.pop(name) for name in options}
            return command(*args, **named, **{argument: make(**values)})

        own = [x for x in signature(command).parameters.values() if x.name != argument]
        # `**named`, if there is one, stays last.
        end = len(own) - any(x.kind == Parameter.VAR_KEYWORD for x in own)
        own[end:end] = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=usual, annotation=kind)
            for name, (kind, usual) in options.items()
        ]
        described: Any = placed
        described.__signature__ = signature(command).replace(parameters=own)
        return placed

    return decorate


def _place(**values: Any) -> Place:
    limits = Limits(*(values.pop(f"{x}_timeout") for x in TIMEOUTS))
    return Place(**values, limits=limits)


# The options of several processes, in place of `place`.
with_place = in_place_of("place", _PLACES, _place)
