"""Batches of several shapes that are known ahead, so that plans can be."""

from abc import abstractmethod
from typing import Any

import grain


class AbstractForeseen(grain.DatasetIterator):
    """An iterator over batches of a few shapes, which it knows before they come.

    `Trainer` places the state for the largest of them, and has the plans of the others
    made while steps run.
    """

    @abstractmethod
    def whole(self) -> Any:
        """Shapes and dtypes of the largest batch. One batch must have been taken."""

    def first(self) -> Any:
        """Shapes and dtypes of the first batch, or None if it must be taken first.

        For batches that take long to make, and that a resumed run has no use for.
        """
        return None

    @abstractmethod
    def coming(self, num_steps: int) -> list[Any]:
        """Shapes and dtypes of the next `num_steps` batches, each of them once.

        In the order in which they come. One batch must have been taken.
        """
