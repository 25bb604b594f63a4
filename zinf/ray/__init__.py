"""Trains on the workers of a Ray cluster, with restarts; needs the extra `ray`."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.ray.fit import Fitted as Fitted
    from zinf.ray.fit import fit as fit
    from zinf.ray.group import RayGroup as RayGroup
    from zinf.ray.record import Attempt as Attempt
    from zinf.ray.restart import WorkersLost as WorkersLost
    from zinf.ray.settings import FailureConfig as FailureConfig
    from zinf.ray.settings import ScalingConfig as ScalingConfig

make_lazy(__name__, extra="ray")
