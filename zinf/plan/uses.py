"""Who used some rows before, in the order of a list."""

from zinf.program import Rows, covers, overlaps


class Uses:
    """Who wrote and who reads a copy so far, by rows (None: all of it)."""

    def __init__(self) -> None:
        self._writers: list[tuple[Rows, int]] = []
        self._readers: list[tuple[Rows, int]] = []

    def read(self, rows: Rows, index: int) -> list[int]:
        """Notes a reader of some rows; returns those that it has to wait for."""
        self._readers.append((rows, index))
        return [i for other, i in self._writers if overlaps(rows, other)]

    def write(self, rows: Rows, index: int) -> list[int]:
        """The same for a writer, which then stands for all that it waits for."""
        uses = self._writers + self._readers
        self._writers = [u for u in self._writers if not covers(rows, u[0])]
        self._readers = [u for u in self._readers if not covers(rows, u[0])]
        self._writers.append((rows, index))
        return [i for other, i in uses if overlaps(rows, other)]
