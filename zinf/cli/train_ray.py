"""`zinf train --ray`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from zinf import ray
from zinf.cli.endings import say
from zinf.cli.train import SET_ASIDE, train_config
from zinf.core.config import Config
from zinf.core.config.load import override, raw_config
from zinf.distributed import Limits
from zinf.ray.settings import FailureConfig, ScalingConfig


def train_on_ray(
    path: Path,
    overrides: Sequence[str],
    trace: Path | None,
    trace_steps: int,
    *,
    scaling: ScalingConfig,
    failure: FailureConfig,
    address: str | None,
    limits: Limits,
    allow_changed: Sequence[str] = (),
) -> None:
    """Trains the model of a config file on the workers of a Ray cluster."""
    raw = override(raw_config(path), overrides)
    output = Config.load({"run": raw.get("run") or {}}).run.output
    if scaling.fewest < scaling.most and raw.get("train_batch_size") is None:
        raise ValueError(
            f"The run may have {scaling.fewest} to {scaling.most} workers "
            "(--min-workers, --workers), and the config does not say how many samples "
            "a step has on all of them. Set train_batch_size in place of "
            "train_micro_batch_size_per_gpu."
        )
    given = (path.absolute(), overrides, trace, trace_steps, allow_changed)
    try:
        ray.fit(
            partial(_train, *given),
            scaling=scaling,
            failure=failure,
            storage=output,
            address=address,
            limits=limits,
            say=say,
        )
    except KeyboardInterrupt:
        say("Continue with the same command and --set run.resume=true.")
        raise


def _train(
    path: Path,
    overrides: Sequence[str],
    trace: Path | None,
    trace_steps: int,
    allow_changed: Sequence[str],
    group: "ray.RayGroup",
) -> None:
    # An attempt that ended before this meeting left everything as it was.
    if group.has_passed(SET_ASIDE):
        overrides = [*overrides, "run.resume=true"]
    train_config(path, overrides, trace, trace_steps, group, allow_changed)
