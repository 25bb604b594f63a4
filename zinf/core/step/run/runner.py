"""The interface of runners, which run the steps of one plan."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zinf.core.optim.advance import Advance
from zinf.core.plan import Plan
from zinf.core.problem.weighted import Weighted
from zinf.core.step.run.outcome import Outcome
from zinf.core.step.run.run import StepRecord
from zinf.core.step.setup import Setup
from zinf.core.step.step_weight import StepWeight

# `(batch, keys, current runner) -> loss`, as floats, for batches of one shape.
Evaluate = Callable[[Any, Sequence[Any], "AbstractRunner"], Weighted]


class AbstractRunner(ABC):
    """Runs steps of one plan on microbatches of one shape (`spec`)."""

    plan: Plan
    spec: Any
    num_microbatches: int
    weight: StepWeight | None

    @abstractmethod
    def enter(self) -> None:
        """Put the arrays in place that only this plan has at rest.

        Called before the first step, and before a step that follows one of another
        runner.
        """

    @abstractmethod
    def leave(self) -> None:
        """Free what `enter` put in place, or some of it if it failed.

        No deferred update may be pending.
        """

    @abstractmethod
    def step(
        self,
        batch: Any,
        keys: Sequence[Any],
        *,
        advance: Advance,
        loss_scale: float,
        record: StepRecord,
    ) -> Outcome:
        """Run one training step. It makes `advance.after` available.

        Args:
            keys: one random key per microbatch, or empty.

        Raises:
            NonFiniteError: the loss or the gradient is not finite. This step's
                gradients updated nothing, unless `record.is_mixed`.
        """

    def step_weight(self, batch: Any, keys: Sequence[Any]) -> float:
        """Divisor of the sum of the microbatches' losses."""
        if self.weight is None:
            return float(self.num_microbatches)
        return self.weight.of(batch, self.spec, keys)

    @abstractmethod
    def flush(self, record: StepRecord) -> None:
        """Run the updates that the last step deferred, if any."""

    @abstractmethod
    def drop_pending(self) -> None:
        """Drop the deferred updates; the state that they would update is replaced."""

    @abstractmethod
    def evaluation(self, setup: Setup, spec: Any) -> Evaluate:
        """Plans and compiles the evaluation of batches of one shape.

        Args:
            spec: shapes and dtypes of one microbatch, which may be another than the
                runner's.

        Raises:
            InfeasibleError: the evaluation does not fit beside the arrays at rest.
        """

    def gradient(self, path: str) -> np.ndarray | None:
        """The gradient of a leaf in the last step, unscaled and before clipping.

        None unless the whole gradient waits for a deferred update.
        """
        return None


def switch(current: AbstractRunner | None, runner: AbstractRunner) -> AbstractRunner:
    """Leave `current` and enter `runner`, unless they are the same; return `runner`.

    If `runner` cannot be entered, `current` is as before.
    """
    if runner is current:
        return runner
    if current is not None:
        current.leave()
    try:
        runner.enter()
    except BaseException:
        runner.leave()
        if current is not None:
            current.enter()
        raise
    return runner
