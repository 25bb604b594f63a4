"""The optimizer state that leaves share, through one step."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from zinf.core.optim.apart import NO_GROUPS, NormGroups


class Advance:
    """The optimizer state that leaves share, through one step.

    Attributes:
        before: as it was before the step.
        reads_step: what comes after depends on the loss of the step, or on norms of its
            gradients.
    """

    def __init__(
        self,
        before: Sequence[np.ndarray],
        compute: Callable,
        *,
        reads_loss: bool,
        norm_groups: NormGroups = NO_GROUPS,
    ) -> None:
        """See `compile_advance` for `compute`."""
        self.before, self.reads_step = before, reads_loss or bool(norm_groups)
        self._compute, self._groups = compute, norm_groups
        self._found: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None
        if not self.reads_step:
            self._found = compute(before)

    def values(
        self,
        loss: float,
        factor: float = 1.0,
        squares: Iterable[tuple[int, float]] = (),
    ) -> Sequence[np.ndarray]:
        """The step values. They are computed once, from the first arguments.

        Args:
            loss: the mean loss of the step.
            factor, squares: see `NormGroups.norms`.
        """
        if self._found is None:
            norms = self._groups.norms(squares, factor)
            self._found = self._compute(self.before, np.float32(loss), norms)
        return self._found[1]

    def take(self, shared: Sequence[np.ndarray]) -> None:
        """Takes the new shared state from a program that computed it in the step."""
        self._found = shared, ()

    @property
    def after(self) -> Sequence[np.ndarray]:
        """The shared state after the step."""
        assert self._found is not None, "the loss of the step is not known yet"
        return self._found[0]
