"""The weight of a step, by which the sum of its losses becomes their mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import jax

from zinf.core.problem.weighted import LossWeight
from zinf.core.step.batch import by_microbatch
from zinf.distributed import AbstractGroup


@dataclass(frozen=True)
class StepWeight:
    """Divisor of the sum of a step's losses.

    Attributes:
        weight: of one microbatch of this process.
        num_microbatches: of a step.
        group: the processes, which all have parts of the batch.
        num_shares: number of parts into which the processes divide a batch.
    """

    weight: LossWeight
    num_microbatches: int
    group: AbstractGroup
    num_shares: int

    def of(self, batch: Any, spec: Any, keys: Sequence[Any]) -> float:
        """The weight of one step. All processes must call it, and get the same.

        Args:
            batch: this process's part of the batch.
            spec: shapes and dtypes of one microbatch.
            keys: one random key per microbatch, or empty.

        Raises:
            ValueError: the weight is zero, negative or not finite.
        """
        batches = by_microbatch(batch, spec, self.num_microbatches)
        stacked = jax.numpy.stack(list(keys)) if keys else None
        total = self.weight.total(batches, stacked)
        if self.group.count > 1:
            # Processes along the other mesh axes have the same part of the batch.
            parts = self.group.gather("weight of the loss", total)
            total = sum(parts) * self.num_shares / self.group.count
        if not (isfinite(total) and total > 0):
            raise ValueError(
                f"The weight of the batch's loss is {total}: no token or sample of it "
                "is trained on. Leave such batches out, or check labels and masks."
            )
        return total
