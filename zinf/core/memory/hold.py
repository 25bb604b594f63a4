"""Holds: arrays must not change until a save has read them."""

from collections.abc import Iterable
from threading import Condition

from zinf.core.program import ArrayId, Rows, overlaps


class Holds:
    """Arrays of a store that must not change yet, because a background save reads them.

    A thread that changes an array waits for the holds on that array only, so it need
    not wait for the end of the save. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._rows: dict[ArrayId, list[Rows]] = {}
        self._changed = Condition()

    def hold(self, arrays: Iterable[ArrayId]) -> None:
        """Hold `arrays` (wholes or rows): each must not change until its release."""
        with self._changed:
            for array in arrays:
                self._rows.setdefault(array.whole, []).append(array.rows)

    def release(self, array: ArrayId) -> None:
        """End one hold on exactly this id."""
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
