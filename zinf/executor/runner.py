"""What runs the steps of one plan, whichever way."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from zinf.executor.outcome import Outcome
from zinf.executor.run import StepRecord
from zinf.optim.advance import Advance
from zinf.plan import Plan
from zinf.prepare.planner import Planner


class AbstractRunner(ABC):
    """Runs steps of one plan on microbatches of one shape (`spec`)."""

    plan: Plan
    spec: Any
    num_microbatches: int

    @abstractmethod
    def enter(self) -> None:
        """Puts in place what this plan has at rest and others have not.

        Called before the first step, and when the last one was another runner's.
        """

    @abstractmethod
    def leave(self) -> None:
        """Takes away what `enter` put in place; nothing is pending then."""

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
        """One training step. `keys` holds a random key a microbatch, or nothing.

        Afterwards `advance.after` is known.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; unless
                `record.is_mixed`, nothing was updated by it.
        """

    @abstractmethod
    def flush(self, record: StepRecord) -> None:
        """Does the updates that the last step left to the next one, if any."""

    @abstractmethod
    def drop_pending(self) -> None:
        """Forgets those updates: the state that they belong to is being replaced."""

    def gradient(self, planner: Planner, path: str) -> np.ndarray | None:
        """The gradient of a leaf in the last step, not scaled and before clipping.

        None unless all of it waits for an update that the step left to the next one.
        """
        return None

    @abstractmethod
    def prepare_evaluation(self) -> None:
        """Plans and compiles what `evaluate` runs, if that is planned at all.

        Raises:
            InfeasibleError: it does not fit beside what is at rest.
        """

    @abstractmethod
    def evaluate(self, batch: Any, keys: Sequence[Any]) -> float:
        """The mean loss of a batch; changes nothing."""
