"""Runs of training, in the processes or on the Ray cluster that options say."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from zinf import ray
from zinf.cli.endings import say
from zinf.cli.errors import clean_errors
from zinf.cli.group import joined
from zinf.cli.train import SET_ASIDE
from zinf.core.config import Config
from zinf.core.config.load import override
from zinf.distributed import Limits
from zinf.distributed.options import Place
from zinf.ray.options import OnCluster

Run = Callable[..., None]


def run_placed(
    run: Run,
    raw: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    place: Place,
    cluster: OnCluster,
    traceback: bool,
) -> None:
    """Run training in this process, as one of several, or on workers of a cluster.

    Args:
        run: gets `overrides` and `group`. It is sent to the workers.
        raw: keys of its config, before the overrides.
    """
    with clean_errors(traceback):
        cluster.check(place)
        if cluster.ray:
            found = override(raw, overrides)
            _run_on_ray(run, found, overrides, cluster, place.limits)
            return
    with joined(place, traceback) as group:
        run(overrides=overrides, group=group)


def _run_on_ray(
    run: Run,
    raw: Mapping[str, Any],
    overrides: Sequence[str],
    cluster: OnCluster,
    limits: Limits,
) -> None:
    scaling = cluster.scaling
    if scaling.fewest < scaling.most and raw.get("train_batch_size") is None:
        raise ValueError(
            f"The run may have {scaling.fewest} to {scaling.most} workers "
            "(--min-workers, --workers), and the config does not say how many samples "
            "a step has on all of them. Set train_batch_size in place of "
            "train_micro_batch_size_per_gpu."
        )
    try:
        ray.fit(
            partial(_attempt, run, overrides),
            scaling=scaling,
            failure=cluster.failure,
            storage=Config.load({"run": raw.get("run") or {}}).run.output,
            address=cluster.address,
            limits=limits,
            say=say,
        )
    except KeyboardInterrupt:
        say("Continue with the same command and --set run.resume=true.")
        raise


def _attempt(run: Run, overrides: Sequence[str], group: "ray.RayGroup") -> None:
    # An attempt that ended before this meeting left everything as it was.
    if group.has_passed(SET_ASIDE):
        overrides = [*overrides, "run.resume=true"]
    run(overrides=overrides, group=group)
