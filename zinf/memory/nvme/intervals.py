"""Which rows of an array have something: a set of whole numbers, kept as ranges.

A byte a row would be as large as the array itself where that has one dim.
"""

from bisect import bisect_left, bisect_right


class Intervals:
    """A set of whole numbers that is added to and taken from by ranges."""

    def __init__(self) -> None:
        # Disjoint, not adjacent, in order: starts and stops in turn.
        self._edges: list[int] = []

    def add(self, start: int, stop: int) -> None:
        self._replace(start, stop, is_in=True)

    def remove(self, start: int, stop: int) -> None:
        self._replace(start, stop, is_in=False)

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of `start` to `stop` is in; true of nothing."""
        position = bisect_right(self._edges, start)
        is_inside = position % 2 == 1 and stop <= self._edges[position]
        return start >= stop or is_inside

    def _replace(self, start: int, stop: int, *, is_in: bool) -> None:
        if start >= stop:
            return
        edges = self._edges
        low = bisect_left(edges, start)
        high = bisect_right(edges, stop)
        new = []
        if (low % 2 == 0) == is_in:
            new.append(start)
        if (high % 2 == 0) == is_in:
            new.append(stop)
        edges[low:high] = new
