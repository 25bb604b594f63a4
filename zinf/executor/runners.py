"""Makes the runner of a prepared step, and switches between runners."""

from collections.abc import Callable
from functools import partial
from typing import Any

from zinf.executor.runner import AbstractRunner
from zinf.executor.streamed import StreamedRunner
from zinf.executor.whole import FusedRunner
from zinf.memory import Stores
from zinf.prepare.planner import Fused, Planner, Streamed


def switch(current: AbstractRunner | None, runner: AbstractRunner) -> AbstractRunner:
    """Leave `current` and enter `runner`, unless they are the same; return `runner`."""
    if runner is not current:
        if current is not None:
            current.leave()
        runner.enter()
    return runner


def make_runner(
    prepared: Streamed | Fused,
    planner: Planner,
    stores: Stores,
    spec: Any,
    before_update: Callable[[], None],
) -> AbstractRunner:
    """The runner of a prepared step, for batches of one shape.

    Args:
        spec: shapes and dtypes of one microbatch.
        before_update: called before a step changes the first array.
    """
    config = planner.config
    skips_overflow = config.loss_scaling is not None
    if isinstance(prepared, Streamed):
        return StreamedRunner(
            prepared,
            stores,
            spec,
            make_evaluation=partial(planner.evaluation, spec, prepared),
            clipping=planner.clipping,
            skips_overflow=skips_overflow,
            before_update=before_update,
        )
    return FusedRunner(
        prepared,
        stores,
        spec,
        planner.problem,
        num_microbatches=config.num_microbatches,
        skips_overflow=skips_overflow,
        before_update=before_update,
    )
