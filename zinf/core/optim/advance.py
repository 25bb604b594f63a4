"""The optimizer state that leaves share, through one step."""

from collections.abc import Callable, Sequence

import numpy as np


class Advance:
    """The optimizer state that leaves share, through one step.

    Attributes:
        before: as it was before the step.
        reads_loss: what comes after depends on the loss of the step.
    """

    def __init__(
        self, before: Sequence[np.ndarray], compute: Callable, *, reads_loss: bool
    ) -> None:
        self.before, self.reads_loss = before, reads_loss
        self._compute = compute
        self._found: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None
        if not reads_loss:
            self._found = compute(before)

    def values(self, loss: float) -> Sequence[np.ndarray]:
        """The step values, given the mean loss of the step."""
        if self._found is None:
            self._found = self._compute(self.before, np.float32(loss))
        return self._found[1]

    def take(self, shared: Sequence[np.ndarray]) -> None:
        """Takes the new shared state from a program that computed it with the loss."""
        self._found = shared, ()

    @property
    def after(self) -> Sequence[np.ndarray]:
        """The shared state after the step."""
        assert self._found is not None, "the loss of the step is not known yet"
        return self._found[0]
