"""Runs programs that only run forward, between the steps of a training runner."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zinf.core.memory import Stores
from zinf.core.step.forward import Forward
from zinf.core.step.run.passes import Passes
from zinf.core.step.run.run import StepRecord
from zinf.core.step.run.runner import AbstractRunner


def joined(outputs: Sequence[Any], num_shares: int) -> Any:
    """The outputs of all microbatches as one pytree, rows in the order of the batch.

    Each process has its part of every microbatch, and its rows follow each other in the
    whole batch.

    Args:
        num_shares: number of parts into which the processes divide a batch.
    """
    if len(outputs) == 1:
        return outputs[0]

    def join(*microbatches: np.ndarray) -> np.ndarray:
        rows = np.stack(microbatches)
        by_share = rows.reshape(len(microbatches), num_shares, -1, *rows.shape[2:])
        return np.swapaxes(by_share, 0, 1).reshape(-1, *rows.shape[2:])

    return jax.tree.map(join, *outputs)


class ForwardRunner:
    """Runs one program on batches of one shape. It changes no array at rest.

    Args:
        spec: shapes and dtypes of one microbatch.
    """

    def __init__(self, forward: Forward, stores: Stores, spec: Any):
        self.forward, self.plan = forward, forward.plan
        self.passes = Passes(
            forward.segmented,
            forward.segments,
            forward.layouts,
            stores,
            spec,
            forward.num_microbatches,
        )

    def run(
        self, batch: Any, keys: Sequence[Any], training: AbstractRunner
    ) -> list[list[np.ndarray]]:
        """The flattened outputs of each microbatch: this process's share of each.

        Args:
            keys: one random key per microbatch, or empty.
            training: the runner that the arrays at rest belong to. No deferred update
                may be pending.
        """
        passes, record = self.passes, StepRecord()
        training.leave()
        try:
            passes.put_consts()
            work = passes.work()
            outputs = passes.run(self.plan, work, batch, keys, None, record)
        finally:
            passes.free_consts()
            training.enter()
        if record.interrupted:
            raise KeyboardInterrupt
        return outputs

    def outputs(self, shares: Sequence[Sequence[np.ndarray]]) -> list[Any]:
        """The outputs of each microbatch as whole arrays, in the function's pytree.

        If there are several processes, all must call it.
        """
        passes, structure = self.passes, self.passes.segmented.structure
        wholes = [passes.wholes(m, x) for m, x in enumerate(shares)]
        return [jax.tree.unflatten(structure, x) for x in wholes]
