"""Evaluations of a run: the mean loss on held-out data, and which was the best."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any

from zinf.core.engine.engine import Engine

# An evaluation without a limit says so after so many batches: the data may have no end.
MANY_BATCHES = 1000


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run so far.

    Attributes:
        loss, step: of that evaluation; infinite and 0 if there was none.
        num_worse: evaluations since then.
    """

    loss: float = inf
    step: int = 0
    num_worse: int = 0

    def after(self, loss: float, step: int) -> "Best":
        if loss < self.loss:
            return Best(loss, step)
        return replace(self, num_worse=self.num_worse + 1)

    def in_words(self) -> str:
        return f"The best evaluation, {self.loss:.6g}, was after step {self.step}"

    def no_better(self) -> str:
        """The sentence that says how many evaluations were no better."""
        return (
            f"{self.num_worse} evaluations in a row were no better than the one "
            f"after step {self.step}"
        )


def mean_loss(
    engine: Engine,
    data: Iterable[Any],
    *,
    num_batches: int | None,
    weights: str,
    say: Callable[[str], None],
) -> float:
    """The mean loss over batches, by weight; see `Weighted`.

    Args:
        num_batches: the most that are taken; None takes all.
        weights: what the loss is computed with; see `Trainer`.
    """
    losses = []
    for batch in islice(data, num_batches):
        losses.append(engine.evaluate_weighted(batch, kind=weights))
        if len(losses) == MANY_BATCHES and num_batches is None:
            say(
                f"This evaluation has had {MANY_BATCHES:,} batches and takes all. "
                "evaluate_batches is the most that one takes."
            )
    if not losses:
        raise ValueError(
            "evaluate_every is set, but evaluation_data has no batch. Give more "
            "data, or a smaller batch."
        )
    return sum(x.total for x in losses) / sum(x.weight for x in losses)
