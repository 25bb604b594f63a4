"""Steps that are one executable, and fused ones with all arrays on the device."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from zinf.core.jaxpr.keys import from_words, to_words
from zinf.core.memory import Stores, to_devices
from zinf.core.optim.advance import Advance
from zinf.core.optim.decision import decision_of
from zinf.core.plan import Instruction, fused_plan
from zinf.core.problem.weighted import Weighted
from zinf.core.program import Role, Tier
from zinf.core.sharding import Layouts, placed_layout, whole_layout
from zinf.core.step.batch import by_microbatch
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.step.run.links import Progress, run_links
from zinf.core.step.run.outcome import Outcome, outcome_of
from zinf.core.step.run.run import StepRecord
from zinf.core.step.run.runner import AbstractRunner, Evaluate
from zinf.core.step.setup import Setup
from zinf.core.step.step_weight import StepWeight
from zinf.core.step.whole.frame import Frame, batch_shardings
from zinf.core.step.whole.fused import (
    FusedProgram,
    compile_fused,
    fused_evaluation,
)
from zinf.core.step.whole.offloaded import OffloadedProgram


@dataclass(frozen=True, kw_only=True)
class WholeStep(AbstractPrepared):
    """A step that is one executable."""

    program: FusedProgram | OffloadedProgram

    def executables(self) -> Iterator[tuple[Instruction, Any, int | None]]:
        yield self.plan.instructions[0], self.program.step, None


@dataclass(frozen=True, kw_only=True)
class Fused(WholeStep):
    """A step that is one executable, with all arrays on the devices."""

    program: FusedProgram

    @classmethod
    def planned(
        cls,
        setup: Setup,
        layouts: Layouts,
        program: FusedProgram,
        weight: StepWeight | None,
    ) -> Self:
        """The step of a program, with its plan.

        Raises:
            InfeasibleError: state and workspace exceed the device budget.
        """
        plan = fused_plan(
            dict.fromkeys(layouts.arrays, Tier.DEVICE),
            layouts.device_bytes,
            program.workspace_bytes,
            setup.capacity(),
            program.flops,
            setup.rates(),
        )
        return cls(plan=plan, program=program, layouts=layouts, weight=weight)

    def updating(self, setup: Setup) -> Self:
        step = setup.problem, setup.separated, {}, None, 1, setup.clipping, self.layouts
        program = compile_fused(Frame(*step), is_of_sums=True)
        return self.planned(setup, self.layouts, program, None)

    def runner(
        self, setup: Setup, stores: Stores, spec: Any, before_step: Callable[[], None]
    ) -> "FusedRunner":
        return FusedRunner(self, setup, stores, spec, before_step)


class WholeRunner(AbstractRunner):
    """Runs a step that is one executable, wherever its arrays rest."""

    def __init__(
        self,
        prepared: WholeStep,
        setup: Setup,
        stores: Stores,
        spec: Any,
        before_step: Callable[[], None],
    ):
        self.stores, self.spec = stores, spec
        self.plan = prepared.plan
        self.num_microbatches = setup.config.num_microbatches
        self.skips_overflow = setup.config.may_skip
        self.before_step = before_step
        self.weight = prepared.weight
        self.layouts = prepared.layouts

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def flush(self, record: StepRecord) -> None: ...

    def drop_pending(self) -> None: ...

    def step(
        self,
        batch: Any,
        keys: Sequence[Any],
        *,
        advance: Advance,
        loss_scale: float,
        record: StepRecord,
    ) -> Outcome:
        self.before_step()
        weight = self.step_weight(batch, keys)
        scale = np.float32(loss_scale), np.float32(weight)
        scalars = advance.before if advance.reads_step else advance.values(0.0)
        scalars = [*scalars, *self.rates(record.number)]
        inputs = (*self.inputs(batch, self.spec, keys), scalars, *scale)
        outputs: dict[str, Any] = {}

        def execute(instruction: Instruction) -> None:
            outputs.update(self.execute(instruction, inputs, record))

        record.plan = self.plan
        progress = Progress(len(self.plan.instructions))
        run_links(self.plan.instructions, execute, progress)
        record.interrupted = progress.interrupted
        record.timeline = progress.timeline
        if advance.reads_step:
            advance.take(outputs["shared"])
        losses = [float(x) for x in outputs["losses"]]
        record.decision = decision_of(
            losses,
            outputs["judged"],
            weight=weight,
            skips_overflow=self.skips_overflow,
        )
        return outcome_of(record, outputs["extra"])

    def rates(self, number: int) -> tuple[Any, ...]:
        """What a step reads after the step values; see `AbstractCompression.rates`."""
        del number
        return ()

    @abstractmethod
    def execute(
        self, instruction: Instruction, inputs: Any, record: StepRecord
    ) -> dict[str, Any]:
        """Run the executable, replace all arrays by its results, return its outputs."""

    def inputs(self, batch: Any, spec: Any, keys: Sequence[Any]) -> tuple[Any, Any]:
        batches = by_microbatch(batch, spec, self.num_microbatches)
        return batches, jax.numpy.stack(list(keys)) if keys else None

    def placed(self, batches: Any, spec: Any, keys: Any) -> tuple[Any, Any]:
        """Put the keys and this process's share of the microbatches on the devices."""
        shardings = batch_shardings(spec, self.layouts)
        pairs = zip(jax.tree.leaves(spec), jax.tree.leaves(shardings), strict=True)
        layouts = [
            placed_layout((self.num_microbatches, *leaf.shape), sharding)
            for leaf, sharding in pairs
        ]
        leaves = zip(jax.tree.leaves(batches), layouts, strict=True)
        placed = to_devices([layout.own_of(x) for x, layout in leaves], layouts)
        if keys is not None:
            words = np.asarray(to_words(keys))
            everywhere = whole_layout(words.shape, self.layouts.mesh)
            keys = from_words(to_devices([words], [everywhere])[0], keys)
        return jax.tree.unflatten(jax.tree.structure(batches), placed), keys


class FusedRunner(WholeRunner):
    """Runs fused steps: all arrays rest on the device."""

    def __init__(self, fused: Fused, setup: Setup, *rest: Any):
        super().__init__(fused, setup, *rest)
        self.program = fused.program
        self._evaluate = fused_evaluation(setup.problem, fused.layouts)
        self._compression = fused.layouts.rule.compression
        self._rate = setup.separated.rate

    def rates(self, number: int) -> tuple[Any, ...]:
        if self._compression is None or not self._compression.num_rates:
            return ()
        assert self._rate is not None
        return tuple(map(np.float32, self._compression.rates(number, self._rate)))

    def execute(
        self, instruction: Instruction, inputs: Any, record: StepRecord
    ) -> dict[str, Any]:
        """Run the executable, replace all arrays by its results, return its outputs."""
        ((tier, workspace),) = instruction.workspace
        device = self.stores[tier]
        arrays = [device.read(a).result() for a in self.program.arrays]
        device.ledger.reserve(workspace, "the fused step")
        try:
            batches, keys, *scalars = inputs
            placed = *self.placed(batches, self.spec, keys), *scalars
            record.is_mixed = True
            program = self.program.step
            if self._compression is not None:
                program = self.program.of(self._compression.phase(record.number))
            results, outputs = program(arrays, *placed)
            del arrays
            for array, content in zip(self.program.arrays, results, strict=True):
                device.write(array, content).result()
            outputs = jax.tree.map(np.asarray, outputs)
        finally:
            device.ledger.release(workspace)
        record.is_mixed = False
        return outputs

    def evaluation(self, setup: Setup, spec: Any) -> Evaluate:
        return lambda batch, keys, _: self._evaluated(batch, spec, keys)

    def _evaluated(self, batch: Any, spec: Any, keys: Sequence[Any]) -> Weighted:
        """The evaluation loss of a batch with microbatches of shape `spec`."""
        params = [
            self.stores.device.read(a).result()
            for a in self.program.arrays
            if a.role == Role.PARAM
        ]
        batches, stacked_keys = self.inputs(batch, spec, keys)
        placed = self.placed(batches, spec, stacked_keys)
        losses = self._evaluate(params, *placed)
        return jax.tree.map(lambda x: float(np.asarray(x, np.float64).sum()), losses)
