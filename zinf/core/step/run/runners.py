"""Makes the runners of steps and evaluations, and switches between runners."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from zinf.core.memory import Stores
from zinf.core.optim.separate import State
from zinf.core.problem.weighted import Weighted, num_rows, weighed
from zinf.core.segment import StateArray, evaluation_function
from zinf.core.step.forward import Forward, forward_of, plan_forward
from zinf.core.step.planner import AtRest, Fused, Offloaded, Planner, Streamed
from zinf.core.step.run.forward import ForwardRunner
from zinf.core.step.run.offloaded import OffloadedRunner
from zinf.core.step.run.runner import AbstractRunner
from zinf.core.step.run.streamed import StreamedRunner
from zinf.core.step.run.whole import FusedRunner


def switch(current: AbstractRunner | None, runner: AbstractRunner) -> AbstractRunner:
    """Leave `current` and enter `runner`, unless they are the same; return `runner`."""
    if runner is not current:
        if current is not None:
            current.leave()
        runner.enter()
    return runner


def make_runner(
    prepared: Streamed | Fused | Offloaded,
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
    skips_overflow = config.may_skip
    if isinstance(prepared, Streamed):
        return StreamedRunner(
            prepared,
            stores,
            spec,
            clipping=planner.clipping,
            skips_overflow=skips_overflow,
            before_update=before_update,
        )
    if isinstance(prepared, Offloaded):
        return OffloadedRunner(
            prepared,
            stores,
            spec,
            num_microbatches=config.num_microbatches,
            skips_overflow=skips_overflow,
            before_update=before_update,
        )
    return FusedRunner(
        prepared,
        stores,
        spec,
        problem=planner.problem,
        num_microbatches=config.num_microbatches,
        skips_overflow=skips_overflow,
        before_update=before_update,
    )


@dataclass(frozen=True)
class Evaluation:
    """Computes the evaluation loss of batches of one shape.

    Attributes:
        forward: the program of an evaluation that runs segment by segment.
        compute: `(batch, keys, current runner) -> loss`, as floats.
    """

    forward: Forward | None
    compute: Callable[[Any, Sequence[Any], AbstractRunner], Weighted]


def make_evaluation(
    planner: Planner, stores: Stores, spec: Any, training: AbstractRunner
) -> Evaluation:
    """Plans and compiles the evaluation of batches of one shape.

    If evaluation computes the loss of training, and `training` is for this shape, its
    executables are used.

    Args:
        spec: shapes and dtypes of one microbatch.
        training: a runner of training steps for this shape or another.

    Raises:
        InfeasibleError: the evaluation does not fit beside the arrays at rest.
    """
    if isinstance(training, FusedRunner):
        fused = training

        def on_device(batch: Any, keys: Sequence[Any], _: AbstractRunner) -> Weighted:
            return fused.evaluate(batch, spec, keys)

        return Evaluation(None, on_device)
    if isinstance(training, OffloadedRunner):
        # A forward pass streams the arrays from where the offloaded step left them.
        made = training.offloaded
        forward = plan_forward(
            planner,
            evaluation_function(planner.problem, planner.key),
            spec,
            AtRest(made.plan.homes, made.layouts),
            num_microbatches=training.num_microbatches,
        )
        return _by_segment(forward, stores, spec)
    assert isinstance(training, StreamedRunner)
    streamed = training.streamed
    is_same = jax.tree.flatten(training.spec) == jax.tree.flatten(spec)
    if planner.problem.evaluation_loss is None and is_same:
        return _as_in_training(forward_of(planner, streamed), training, stores, spec)
    forward = plan_forward(
        planner,
        evaluation_function(planner.problem, planner.key),
        spec,
        AtRest(streamed.plan.homes, streamed.layouts),
        limits=streamed.limits,
        num_microbatches=training.num_microbatches,
    )
    return _by_segment(forward, stores, spec)


def make_average_evaluation(
    planner: Planner,
    stores: Stores,
    spec: Any,
    at_rest: AtRest,
    averages: Mapping[str, State],
) -> Evaluation:
    """Plans and compiles an evaluation that reads averages in place of parameters.

    It runs segment by segment, whatever the training step is.

    Args:
        spec: shapes and dtypes of one microbatch.
        at_rest: where the arrays rest.
        averages: the averages by the path of their leaf; others are read as they are.

    Raises:
        InfeasibleError: the evaluation does not fit beside the arrays at rest.
    """
    function = evaluation_function(planner.problem, planner.key)
    forward = plan_forward(
        planner,
        replace(function, name="loss_fn of averages"),
        spec,
        at_rest,
        num_microbatches=planner.config.num_microbatches,
        instead={
            path: StateArray(state.slot, str(state.spec.dtype))
            for path, state in averages.items()
        },
    )
    return _by_segment(forward, stores, spec)


def _by_segment(forward: Forward, stores: Stores, spec: Any) -> Evaluation:
    runner = ForwardRunner(forward, stores, spec)

    def by_segment(
        batch: Any, keys: Sequence[Any], current: AbstractRunner
    ) -> Weighted:
        losses = []
        for outputs in runner.run(batch, keys, current):
            loss, extra = jax.tree.unflatten(forward.segmented.structure, outputs)
            losses.append(weighed(loss, extra, spec))
        return jax.tree.map(lambda *each: float(sum(map(float, each))), *losses)

    return Evaluation(forward, by_segment)


def _as_in_training(
    forward: Forward, training: StreamedRunner, stores: Stores, spec: Any
) -> Evaluation:
    """An evaluation by the executables of training, which do not return the weight."""
    runner = ForwardRunner(forward, stores, spec)

    def by_segment(
        batch: Any, keys: Sequence[Any], current: AbstractRunner
    ) -> Weighted:
        losses = [float(loss) for loss, *_ in runner.run(batch, keys, current)]
        if training.weight is not None:
            return Weighted(sum(losses), training.step_weight(batch, keys))
        num_samples = num_rows(spec)
        return Weighted(sum(losses) * num_samples, len(losses) * num_samples)

    return Evaluation(forward, by_segment)
