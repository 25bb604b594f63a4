"""How many workers a run has, and how often it starts again.

Classes and fields have the names of Ray Train's `ScalingConfig` and `FailureConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

ONE_CPU: Mapping[str, float] = MappingProxyType({"CPU": 1.0})


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """How many workers train together, and what each needs.

    Args:
        num_workers: the number of workers; or (fewest, most): then the run begins and
            restarts with as many as the cluster has room for.
        resources_per_worker: Ray's resources of a worker, such as {"GPU": 8, "CPU": 32}
            for a worker per host, or {"GPU": 1} for a worker per GPU.
        placement_strategy: Ray's: "SPREAD" puts workers on different nodes where it
            can; "STRICT_SPREAD" puts one on a node, or none; "PACK".
        elastic_resize_monitor_interval_s: seconds between two looks whether the cluster
            has room for more workers. If it has, the run saves and goes on with more.

    Raises:
        ValueError: a number is out of range.
    """

    num_workers: int | tuple[int, int] = 1
    resources_per_worker: Mapping[str, float] = field(default_factory=lambda: ONE_CPU)
    placement_strategy: str = "SPREAD"
    elastic_resize_monitor_interval_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise ValueError(
                f"num_workers is {self.num_workers}: it must be 1 or more, and of "
                "(fewest, most) fewest comes first (--min-workers, --workers)."
            )
        if not any(amount > 0 for amount in self.resources_per_worker.values()):
            raise ValueError(
                f"resources_per_worker is {dict(self.resources_per_worker)}: a worker "
                'needs something that Ray counts, such as {"CPU": 1}.'
            )

    @property
    def fewest(self) -> int:
        match self.num_workers:
            case int(count):
                return count
            case (fewest, _):
                return fewest

    @property
    def most(self) -> int:
        match self.num_workers:
            case int(count):
                return count
            case (_, most):
                return most


@dataclass(frozen=True, slots=True)
class FailureConfig:
    """How often a run starts again, and how long a preempted worker may save.

    Args:
        max_failures: restarts after a worker was lost, hung, or raised an error that
            may not come again; -1 for no limit.
        max_preemption_failures: restarts after a worker was told to leave (SIGTERM); -1
            for no limit.
        preemption_grace_s: seconds from SIGTERM until the worker ends, saved or not. It
            should be less than the scheduler gives: 30 s on Kubernetes by default.
    """

    max_failures: int = 3
    max_preemption_failures: int = -1
    preemption_grace_s: float = 25.0
