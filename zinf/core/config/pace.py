"""A number of tokens that grows while training, in a few buckets.

Pure Python, so that learning-rate schedules know it too.
"""

from collections.abc import Callable
from dataclasses import dataclass

from zinf.core.config.pacing import Pacing, buckets, round_down


@dataclass(frozen=True)
class Pace:
    """A number of tokens that grows while training, in a few buckets.

    Attributes:
        grow: from a count to the number of tokens.
        buckets: the numbers that are used, ascending; others are rounded down to these,
            and numbers below the first are the first.
        first: the count of the first step.
        counts_tokens: the count is the tokens of all steps before, not the step.
    """

    grow: Callable[[int], int]
    buckets: tuple[int, ...]
    first: int = 1
    counts_tokens: bool = False

    def __post_init__(self) -> None:
        if not self.buckets or list(self.buckets) != sorted({*self.buckets}):
            raise ValueError(
                f"buckets is {list(self.buckets)}; it must be ascending, and not empty."
            )
        if self.buckets[0] < 1:
            raise ValueError(
                f"The shortest of buckets is {self.buckets[0]} tokens; it must be at "
                "least 1."
            )

    @classmethod
    def of(
        cls, pacing: Pacing, max_buckets: int, *, first: int | None = None
    ) -> "Pace":
        """The pace of a section of a config.

        Args:
            first: the count of the first step, if it is not the one of a curriculum.
        """
        kept = buckets(pacing.levels(first), max_buckets)
        first = pacing.first_count if first is None else first
        return cls(pacing, kept, first, pacing.counts_tokens)

    def at(self, step: int, tokens: int) -> int:
        """The number for a step.

        Args:
            step: the number of steps before.
            tokens: the number of tokens before.
        """
        count = tokens if self.counts_tokens else step + self.first
        return round_down(self.grow(count), self.buckets)


def counted_steps(
    num_steps: int,
    *,
    longest: int,
    length: Pace | None = None,
    reshapes: bool = False,
    kept: Pace | None = None,
    share: float = 0.0,
    rows: int = 1,
) -> tuple[list[int], list[float]]:
    """Tokens before a step, in whole steps: a function that is linear between points.

    The learning rate of a run with a curriculum follows its tokens with it: decay by
    steps would be too early (arXiv 2108.06084, section 4).

    Args:
        longest: tokens of a row of a whole step.
        length, reshapes: as for `Paced`.
        kept: as for `Dropping`; None to count tokens and not tokens of layers.
        share: share of the layers that drop tokens.
        rows: rows of a batch of all processes.

    Returns:
        the steps where the number of tokens changes, and what was counted before them.
        The last point is `num_steps`.
    """
    steps, counted, tokens, done, before = [0], [0.0], 0, 0.0, None
    for step in range(num_steps):
        size = longest if length is None else length.at(step, tokens)
        pieces = longest // size if reshapes else 1
        few = size if kept is None else min(kept.at(step, tokens), size)
        now = pieces * ((1 - share) * size + share * few) / longest
        if before not in (None, now):
            steps.append(step)
            counted.append(done)
        before, done, tokens = now, done + now, tokens + rows * pieces * size
    return [*steps, num_steps], [*counted, done]
