"""What one step gives back, whichever way it ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from zinf.plan import Link


@dataclass(frozen=True)
class Outcome:
    """Results and measurements of a step.

    Attributes:
        losses: of each microbatch, not scaled.
        grad_norm: of the whole gradient, not scaled and before clipping.
        skips: the step overflowed and changed nothing.
        extra: the loss function's other outputs, with a leading microbatch dim.
        interrupted: Ctrl-C came while it ran; the step is complete all the same.
    """

    losses: Sequence[float]
    grad_norm: float
    skips: bool
    extra: Any
    interrupted: bool = False
    moved_bytes: Mapping[Link, int] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def mean_over_microbatches(array: np.ndarray) -> np.ndarray:
    """One value of a state that every microbatch computed: a mean, or the last count.

    All microbatches start from the same state, so a running mean of batch statistics
    advances by the mean over the whole batch; what is not floating-point (a counter, a
    random key) advances once.
    """
    if len(array) == 1 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array[-1]
    return array.mean(axis=0, dtype=np.float32).astype(array.dtype)
