"""Command-line options of commands that run on a Ray cluster."""

from collections.abc import Mapping
from typing import Annotated

import typer

from zinf.ray.settings import FailureConfig, ScalingConfig

# The classes have slots, so their defaults can be read only from an instance.
FAILURES = FailureConfig()

OnRay = Annotated[
    bool,
    typer.Option(
        "--ray",
        # Typer reads brackets as markup, so `zinf[ray]` would lose its end.
        help="Train on the workers of a Ray cluster, with restarts; needs the extra "
        "ray of zinf.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        envvar="RAY_ADDRESS",
        help="Of the cluster; without it one is started here for this run.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(help="How many train together; 1 if absent."),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(help="How many are enough to go on with; --workers if absent."),
]
WorkerResources = Annotated[
    str,
    typer.Option(metavar="GPU=8,CPU=32", help="What Ray reserves for each worker."),
]
MaxFailures = Annotated[
    int,
    typer.Option(help="Restarts after a worker was lost or failed; -1: no limit."),
]
MaxPreemptionFailures = Annotated[
    int,
    typer.Option(
        help="Restarts after a worker was told to leave (SIGTERM); -1: no limit."
    ),
]
PreemptionGrace = Annotated[
    float,
    typer.Option(min=0.0, help="Seconds that a worker has to save after SIGTERM."),
]


def scaling(
    workers: int | None, min_workers: int | None, resources: str
) -> ScalingConfig:
    """The settings of --workers, --min-workers and --worker-resources.

    Raises:
        ValueError: a number is out of range, or the resources cannot be read.
    """
    most = workers or 1
    fewest = most if min_workers is None else min_workers
    return ScalingConfig((fewest, most), parse_resources(resources))


def parse_resources(text: str) -> Mapping[str, float]:
    """ "GPU=8,CPU=32" -> {"GPU": 8.0, "CPU": 32.0}."""
    found = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError as error:
            raise ValueError(
                f"--worker-resources is {text!r}; it must be names of Ray's resources "
                "with amounts, such as GPU=8,CPU=32."
            ) from error
    return found


def check_absent(**given: object) -> None:
    """Raise ValueError if an option has a value that has no effect without --ray."""
    names = [f"--{k.replace('_', '-')}" for k, v in given.items() if v is not None]
    if names:
        raise ValueError(f"{', '.join(names)} need --ray, or leave them out.")


def check_no_seat(**given: object) -> None:
    """Raise ValueError if an option places this process, which Ray does."""
    names = [f"--{k.replace('_', '-')}" for k, v in given.items() if v is not None]
    if names:
        raise ValueError(
            f"{', '.join(names)} cannot be given with --ray, which places processes "
            "itself; give --workers."
        )
