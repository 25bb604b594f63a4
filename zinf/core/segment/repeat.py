"""Finds where a program repeats: the layers of a model, in its list of equations.

Cuts that follow the repetition give all layers one executable. Cuts at the narrowest
points alone do not: in a post-norm block these lie inside the block.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Repetition:
    """`num_equal` equations from `start` on equal those `period` further on."""

    start: int
    period: int
    num_equal: int

    @property
    def stop(self) -> int:
        return self.start + self.num_equal + self.period

    def copies(self, phase: int) -> int:
        """Whole periods from `start + phase` on."""
        return (self.stop - self.start - phase) // self.period


def find_repetition(
    keys: Sequence[Hashable], param_bytes: Sequence[int]
) -> Repetition | None:
    """The repetition that covers the most parameter bytes; of near ties, the shortest.

    Args:
        keys: a key of each equation, without its variables.
        param_bytes: bytes of the parameters that each equation is the first to read.
    """
    if len(keys) < 2:
        return None
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(k, len(numbers)) for k in keys])
    total = np.concatenate([[0], np.cumsum(param_bytes)])
    found: list[tuple[int, Repetition]] = []
    for period in range(1, len(keys) // 2 + 1):
        start, length = _longest_run(codes[:-period] == codes[period:])
        if length < period:
            continue
        repetition = Repetition(start, period, length)
        covered = start + repetition.copies(0) * period
        found.append((int(total[covered] - total[start]), repetition))
    best = max((score for score, _ in found), default=0)
    if best == 0:
        return None
    return next(r for score, r in found if score >= 0.9 * best)


def _longest_run(flags: np.ndarray) -> tuple[int, int]:
    """`(start, length)` of the longest run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    starts, stops = edges[::2], edges[1::2]
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest] - starts[longest])
