"""Command-line options of commands that run on a Ray cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from zinf.distributed.options import Place, in_place_of
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


@dataclass(frozen=True)
class OnCluster:
    """What the options say of a run on the workers of a Ray cluster.

    Attributes:
        ray: whether it runs there at all.
        workers, min_workers, worker_resources: see `scaling`.
        max_failures, max_preemption_failures, preemption_grace: see `FailureConfig`.
    """

    ray: bool
    address: str | None
    workers: int | None
    min_workers: int | None
    worker_resources: str
    max_failures: int
    max_preemption_failures: int
    preemption_grace: float

    @property
    def scaling(self) -> ScalingConfig:
        return scaling(self.workers, self.min_workers, self.worker_resources)

    @property
    def failure(self) -> FailureConfig:
        counts = self.max_failures, self.max_preemption_failures
        return FailureConfig(*counts, self.preemption_grace)

    def check(self, place: Place) -> None:
        """Refuse options that have no effect together.

        Raises:
            ValueError: `place` says which of several processes this is, and Ray places
                them; or options of a cluster are given for a run on none.
        """
        if not self.ray:
            given = {"workers": self.workers, "min_workers": self.min_workers}
            if names := _given(given):
                raise ValueError(f"{names} need --ray, or leave them out.")
            return
        seat = ("coordinator", "num_processes", "process_id", "local_devices")
        if names := _given({name: getattr(place, name) for name in seat}):
            raise ValueError(
                f"{names} cannot be given with --ray, which places processes itself; "
                "give --workers."
            )


def _given(options: Mapping[str, object]) -> str:
    """The flags of those options that have a value."""
    given = [name for name, value in options.items() if value is not None]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


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


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "ray": (OnRay, False),
    "address": (Address, None),
    "workers": (Workers, None),
    "min_workers": (MinWorkers, None),
    "worker_resources": (WorkerResources, "CPU=1"),
    "max_failures": (MaxFailures, FAILURES.max_failures),
    "max_preemption_failures": (
        MaxPreemptionFailures,
        FAILURES.max_preemption_failures,
    ),
    "preemption_grace": (PreemptionGrace, FAILURES.preemption_grace_s),
}
# The options of a Ray cluster, in place of `cluster`.
with_cluster = in_place_of("cluster", _OPTIONS, OnCluster)
