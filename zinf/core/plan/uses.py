"""Tracks the earlier writers and readers of rows, to find hazards."""

from zinf.core.program import Rows, covers, overlaps


class Uses:
    """The instructions that wrote and read a copy so far, by rows (None: all rows)."""

    __slots__ = ("_readers", "_writers")

    def __init__(self) -> None:
        self._writers: list[tuple[Rows, int]] = []
        self._readers: list[tuple[Rows, int]] = []

    def read(self, rows: Rows, index: int) -> list[int]:
        """Adds a reader of some rows; returns the writers that it must wait for."""
        self._readers.append((rows, index))
        if rows is None or not self._writers:
            return [i for _, i in self._writers]
        return [i for other, i in self._writers if overlaps(rows, other)]

    def note_read(self, rows: Rows, index: int) -> None:
        """Adds a reader of some rows, as `read` does, without returning writers."""
        self._readers.append((rows, index))

    def all(self) -> list[int]:
        """All uses that are not dropped."""
        return [i for _, i in self._writers] + [i for _, i in self._readers]

    def write(self, rows: Rows, index: int) -> list[int]:
        """Adds a writer of some rows; returns the uses that it must wait for.

        Earlier uses that the rows cover are dropped: waiting for this writer implies
        waiting for them.
        """
        if rows is None:
            found = self.all()
            self._writers.clear()
            self._readers.clear()
            self._writers.append((None, index))
            return found
        uses = self._writers + self._readers
        self._writers = [u for u in self._writers if not covers(rows, u[0])]
        self._readers = [u for u in self._readers if not covers(rows, u[0])]
        self._writers.append((rows, index))
        return [i for other, i in uses if overlaps(rows, other)]
