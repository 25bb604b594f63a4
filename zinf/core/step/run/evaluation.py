"""Evaluates the loss segment by segment, from where the arrays of a step rest."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from zinf.core.memory import Stores
from zinf.core.problem.weighted import Weighted, weighed
from zinf.core.segment import NOTHING, Instead, evaluation_function
from zinf.core.step.forward import plan_forward
from zinf.core.step.run.forward import ForwardRunner
from zinf.core.step.run.runner import AbstractRunner, Evaluate
from zinf.core.step.setup import AtRest, Setup
from zinf.core.step.shrink import Limits


def evaluation_by_segment(
    setup: Setup,
    stores: Stores,
    spec: Any,
    at_rest: AtRest,
    *,
    limits: Limits | None = None,
    instead: Instead = NOTHING,
) -> Evaluate:
    """Plans and compiles an evaluation that runs segment by segment.

    Args:
        spec: shapes and dtypes of one microbatch.
        limits: the first limits on segments; None for those of the config.
        instead: averages that are read in place of parameters.

    Raises:
        InfeasibleError: the evaluation does not fit beside the arrays at rest.
    """
    function = evaluation_function(setup.problem, setup.key)
    if instead:
        function = replace(function, name="loss_fn of averages")
    forward = plan_forward(
        setup,
        function,
        spec,
        at_rest,
        limits=limits,
        num_microbatches=setup.config.num_microbatches,
        instead=instead,
    )
    runner = ForwardRunner(forward, stores, spec)

    def by_segment(
        batch: Any, keys: Sequence[Any], current: AbstractRunner
    ) -> Weighted:
        losses = []
        for outputs in runner.run(batch, keys, current):
            loss, extra = jax.tree.unflatten(forward.segmented.structure, outputs)
            losses.append(weighed(loss, extra, spec))
        return jax.tree.map(lambda *each: float(sum(map(float, each))), *losses)

    return by_segment
