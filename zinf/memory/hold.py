"""Arrays that stay as they are until somebody has read them."""

from collections.abc import Iterable
from threading import Condition

from zinf.program import ArrayId, Rows, overlaps


class Holds:
    """What of a store's arrays is not to change yet: for a save that goes on beside.

    Whoever changes an array waits here for it, and for nothing else; so what is saved
    early is free early. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._rows: dict[ArrayId, list[Rows]] = {}
        self._changed = Condition()

    def hold(self, arrays: Iterable[ArrayId]) -> None:
        """Let nobody change `arrays`, wholes or rows, until each is released."""
        with self._changed:
            for array in arrays:
                self._rows.setdefault(array.whole, []).append(array.rows)

    def release(self, array: ArrayId) -> None:
        """Let go of exactly what was held under that name."""
        with self._changed:
            rows = self._rows[array.whole]
            rows.remove(array.rows)
            if not rows:
                del self._rows[array.whole]
            self._changed.notify_all()

    def wait(self, array: ArrayId) -> None:
        """Wait until no row of `array` is held."""
        if self._rows:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_held(array))

    def _is_held(self, array: ArrayId) -> bool:
        held = self._rows.get(array.whole, ())
        return any(overlaps(rows, array.rows) for rows in held)
