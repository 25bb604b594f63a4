"""The interface of updates that change arrays in host memory, in place."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np


class AbstractHostUpdate(ABC):
    """The update of one unit on arrays in host memory, in place."""

    @property
    @abstractmethod
    def workspace_bytes(self) -> int:
        """Host memory that a call takes besides its arrays."""

    @abstractmethod
    def __call__(
        self, factor: Any, step_values: Sequence[Any], *arrays: np.ndarray
    ) -> None:
        """Changes master, states and compute copy.

        Args:
            factor: float32 scalar that the gradient is multiplied by.
            step_values: all those of this step.
            arrays: the gradient, which is only read; the master, the states in the
                order of the leaf, and the copy if the unit has one, whose content is
                replaced. All are contiguous.
        """

    @abstractmethod
    def compile(self) -> None:
        """Compiles ahead of the first call, which would compile otherwise."""


def flat(array: np.ndarray) -> np.ndarray:
    """A 1-D view of a contiguous array."""
    assert array.flags.c_contiguous, "reshaping would copy, and the update be lost"
    return array.reshape(-1)
