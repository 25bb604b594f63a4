"""A set of integers kept as ranges: the rows of an array that have content.

One byte for each row would be as large as the array itself if it has one dim.
"""

from bisect import bisect_left, bisect_right


class Intervals:
    """A set of integers; ranges of them are added and removed."""

    def __init__(self) -> None:
        # Starts and stops of the ranges in turn, in order. No ranges touch.
        self._edges: list[int] = []

    def add(self, start: int, stop: int) -> None:
        self._replace(start, stop, is_in=True)

    def remove(self, start: int, stop: int) -> None:
        self._replace(start, stop, is_in=False)

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of `start` to `stop` is in; true for an empty range."""
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
