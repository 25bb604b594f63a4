"""Runs offloaded steps: one executable that reads and writes pinned host memory."""

from typing import Any

import jax
import numpy as np

from zinf.core.memory import Stores
from zinf.core.memory.host.pinned import PinnedStore
from zinf.core.plan import Instruction, OffloadedStep
from zinf.core.step.planner import Offloaded
from zinf.core.step.run.run import StepRecord
from zinf.core.step.run.whole import OneProgramRunner


class OffloadedRunner(OneProgramRunner):
    def __init__(self, offloaded: Offloaded, stores: Stores, spec: Any, **rest: Any):
        super().__init__(offloaded, stores, spec, **rest)
        self.offloaded = offloaded

    def execute(
        self, instruction: Instruction, inputs: Any, record: StepRecord
    ) -> dict[str, Any]:
        program, host = self.offloaded.program, self.stores.host
        assert isinstance(host, PinnedStore)
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
        assert isinstance(instruction.operation, OffloadedStep)
        record.moved_bytes.update(instruction.operation.moved)
        record.is_mixed = False
        return outputs
