"""Offloaded steps: one executable that reads and writes pinned host memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zinf.core.memory import Stores
from zinf.core.plan import Instruction
from zinf.core.step.run.evaluation import evaluation_by_segment
from zinf.core.step.run.run import StepRecord
from zinf.core.step.run.runner import Evaluate
from zinf.core.step.run.whole import WholeRunner, WholeStep
from zinf.core.step.setup import AtRest, Setup
from zinf.core.step.whole.offloaded import OffloadedProgram


@dataclass(frozen=True, kw_only=True)
class Offloaded(WholeStep):
    """A step that is one executable, with all arrays in pinned host memory."""

    program: OffloadedProgram

    def updating(self, setup: Setup) -> WholeStep:
        raise NotImplementedError(
            "An offloaded step adds no gradients to sums (forward_backward). Set "
            "execution to streamed or fused."
        )

    def store_options(self, setup: Setup) -> dict[str, Any]:
        return {"stacks": self.program.stacks}

    def runner(
        self, setup: Setup, stores: Stores, spec: Any, before_step: Callable[[], None]
    ) -> "OffloadedRunner":
        return OffloadedRunner(self, setup, stores, spec, before_step)


class OffloadedRunner(WholeRunner):
    def __init__(self, offloaded: Offloaded, *rest: Any):
        super().__init__(offloaded, *rest)
        self.program = offloaded.program

    def execute(
        self, instruction: Instruction, inputs: Any, record: StepRecord
    ) -> dict[str, Any]:
        program, host = self.program, self.stores.stacks
        assert host is not None, "the stores of an offloaded step have stacks"
        changed, fixed = ([host.take(s) for s in g] for g in program.groups)
        reserved = []
        try:
            for tier, nbytes in instruction.workspace:
                self.stores[tier].ledger.reserve(nbytes, "the offloaded step")
                reserved.append((tier, nbytes))
            batches, keys, *scalars = inputs
            placed = *self.placed(batches, self.spec, keys), *scalars
            record.is_mixed = True
            results, outputs = program.step(changed, fixed, *placed)
            del changed
            for stack, content in zip(program.changed, results, strict=True):
                host.put(stack, content)
            outputs = jax.tree.map(np.asarray, outputs)
            has_loss = bool(np.all(np.isfinite(outputs["losses"])))
            record.has_updated = program.updates_in_passes and has_loss
        finally:
            for tier, nbytes in reserved:
                self.stores[tier].ledger.release(nbytes)
        record.moved_bytes.update(program.moved.moved)
        record.is_mixed = False
        return outputs

    def evaluation(self, setup: Setup, spec: Any) -> Evaluate:
        # A forward pass streams the arrays from where the offloaded step left them.
        at_rest = AtRest(self.plan.homes, self.layouts)
        return evaluation_by_segment(setup, self.stores, spec, at_rest)
