"""Runs planned steps: puts the inputs in place, runs, and collects the results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import isfinite
from typing import Any

import jax
import numpy as np

from zinf.executor.batch import microbatches
from zinf.executor.decision import NonFiniteError, decide
from zinf.executor.fused import FusedProgram
from zinf.executor.links import run_links
from zinf.executor.outcome import Outcome
from zinf.executor.prepare import Fused, Planner, Streamed
from zinf.executor.run import StepRecord, Work, run_plan
from zinf.jaxpr.keys import to_words
from zinf.memory import Stores
from zinf.plan import Instruction, Plan, build_evaluation, initial_copies, value
from zinf.program import ArrayId
from zinf.segment import KEY


class AbstractRunner(ABC):
    """Runs steps of one plan on microbatches of one shape (`spec`)."""

    plan: Plan
    spec: Any

    @abstractmethod
    def enter(self) -> None:
        """Puts in place what this plan has at rest and others have not.

        Called before the first step, and when the last one was another runner's.
        """

    @abstractmethod
    def leave(self) -> None:
        """Takes away what `enter` put in place."""

    @abstractmethod
    def step(
        self,
        batch: Any,
        keys: Sequence[Any],
        *,
        step_values: Sequence[Any],
        loss_scale: float,
        record: StepRecord,
    ) -> Outcome:
        """One training step. `keys` holds a random key a microbatch, or nothing.

        Raises:
            NonFiniteError: see `decide`.
        """

    @abstractmethod
    def evaluate(self, batch: Any, keys: Sequence[Any]) -> float:
        """The mean loss of a batch; changes nothing."""


class StreamedRunner(AbstractRunner):
    def __init__(
        self,
        streamed: Streamed,
        stores: Stores,
        spec: Any,
        *,
        clip_norm: float | None,
        skips_overflow: bool,
        before_update: Callable[[], None],
    ):
        self.streamed, self.stores, self.spec = streamed, stores, spec
        self.plan = streamed.plan
        self.program = streamed.segmented.program
        self.count = streamed.options.num_microbatches
        self.clip_norm, self.skips_overflow = clip_norm, skips_overflow
        self.before_update = before_update
        self.read = {n for s in self.program.segments for n in s.inputs}

    def enter(self) -> None:
        """Puts the arrays that the loss closed over on the device, where they stay.

        They may depend on the shape of the batch: a causal mask, say.
        """
        for name, content in self.streamed.segmented.consts.items():
            content = jax.numpy.asarray(content)
            self.stores.device.write(ArrayId("const", name), content).result()

    def leave(self) -> None:
        for name in self.streamed.segmented.consts:
            self.stores.device.free(ArrayId("const", name))

    def step(
        self,
        batch: Any,
        keys: Sequence[Any],
        *,
        step_values: Sequence[Any],
        loss_scale: float,
        record: StepRecord,
    ) -> Outcome:
        work = self.work(loss_scale, step_values)
        loss_dtype = self.program.values[self.program.loss].dtype
        seed = np.asarray(loss_scale / self.count, dtype=jax.numpy.dtype(loss_dtype))
        seed = jax.device_put(seed, self.stores.device.device)
        losses, extra = self.run(self.plan, work, batch, keys, seed, record)
        decision = record.decision
        assert decision is not None and decision.grad_norm is not None
        return Outcome(
            losses,
            decision.grad_norm,
            decision.skips,
            extra,
            record.interrupted,
            record.moved_bytes,
        )

    def evaluate(self, batch: Any, keys: Sequence[Any]) -> float:
        work, record = self.work(1.0, ()), StepRecord()
        losses, _ = self.run(self._evaluation_plan, work, batch, keys, None, record)
        if record.interrupted:
            raise KeyboardInterrupt
        return sum(losses) / len(losses)

    @cached_property
    def _evaluation_plan(self) -> Plan:
        workspace = self.streamed.segments[-1].evaluation_bytes()
        return build_evaluation(self.streamed.catalog, self.plan, workspace, self.count)

    def work(self, loss_scale: float, step_values: Sequence[Any]) -> Work:
        updates = self.streamed.updates
        return Work(
            program=self.program,
            segments=self.streamed.segments,
            units=self.streamed.units,
            update=partial(updates.apply, step_values),
            is_in_place=updates.is_in_place,
            update_in_place=partial(updates.apply_in_place, step_values),
            decide=partial(
                decide,
                clip_norm=self.clip_norm,
                loss_scale=loss_scale,
                skips_overflow=self.skips_overflow,
            ),
            before_update=self.before_update,
            compute_dtype=self.streamed.compute_dtype,
        )

    def run(
        self,
        plan: Plan,
        work: Work,
        batch: Any,
        keys: Sequence[Any],
        seed: Any,
        record: StepRecord,
    ) -> tuple[list[float], Any]:
        """Runs a plan from inputs to results; its inputs are gone also if it fails."""
        try:
            self.put(batch, keys)
            run_plan(plan, work, self.stores, seed, record)
        except BaseException:
            for array, tier in initial_copies(self.program, self.streamed.options):
                if self.stores[tier].contains(array):
                    self.stores[tier].free(array)
            raise
        return self.take()

    def put(self, batch: Any, keys: Sequence[Any]) -> None:
        """Stores the inputs that segments read: the batch on the host, keys on the
        device."""
        for m, arrays in enumerate(microbatches(batch, self.spec, self.count)):
            for name, array in arrays.items():
                if name in self.read:
                    self.stores.host.write(value(name, m), array).result()
        for m, key in enumerate(keys):
            if KEY in self.read:
                key = jax.device_put(to_words(key), self.stores.device.device)
                self.stores.device.write(value(KEY, m), key).result()

    def take(self) -> tuple[list[float], Any]:
        """Removes the results of a step from the host store."""
        columns: list[list[np.ndarray]] = []
        for m in range(self.count):
            column = []
            for name in (self.program.loss, *self.program.aux):
                array = value(name, m)
                column.append(np.array(self.stores.host.read(array).result()))
                self.stores.host.free(array)
            columns.append(column)
        losses, *extra = (np.stack(rows) for rows in zip(*columns, strict=True))
        structure = self.streamed.segmented.aux_structure
        return [float(x) for x in losses], jax.tree.unflatten(structure, extra)


class FusedRunner(AbstractRunner):
    def __init__(
        self,
        fused: Fused,
        stores: Stores,
        spec: Any,
        evaluate: Callable[..., Any],
        *,
        num_microbatches: int,
        skips_overflow: bool,
        before_update: Callable[[], None],
    ):
        self.fused, self.stores, self.spec = fused, stores, spec
        self.plan = fused.plan
        self.program: FusedProgram = fused.program
        self.count = num_microbatches
        self.skips_overflow = skips_overflow
        self.before_update = before_update
        self._evaluate = evaluate

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def step(
        self,
        batch: Any,
        keys: Sequence[Any],
        *,
        step_values: Sequence[Any],
        loss_scale: float,
        record: StepRecord,
    ) -> Outcome:
        self.before_update()
        scale = np.float32(loss_scale)
        inputs = (*self.inputs(batch, keys), list(step_values), scale)
        outputs: dict[str, Any] = {}

        def execute(instruction: Instruction) -> None:
            outputs.update(self.execute(instruction, inputs, record))

        progress = run_links(self.plan.instructions, execute)
        record.interrupted = progress.interrupted
        record.timeline = progress.timeline
        losses = [float(x) for x in outputs["losses"]]
        norm = float(outputs["grad_norm"])
        skips = not bool(outputs["is_finite"])
        if skips and not self.skips_overflow:
            loss = sum(losses) / len(losses)
            what = (
                f"loss is {loss}" if not isfinite(loss) else f"gradient norm is {norm}"
            )
            raise NonFiniteError(
                f"The {what}. Nothing was updated: parameters and optimizer state are "
                "those of the step before. Lower the learning rate, clip gradients "
                "(gradient_clipping), or look for invalid values in the batch."
            )
        return Outcome(losses, norm, skips, outputs["extra"], record.interrupted)

    def execute(
        self, instruction: Instruction, inputs: Any, record: StepRecord
    ) -> dict[str, Any]:
        """Replaces all arrays by those of the next step, and gives its outputs."""
        ((tier, workspace),) = instruction.workspace
        device = self.stores[tier]
        arrays = [device.read(a).result() for a in self.program.arrays]
        device.ledger.reserve(workspace, "the fused step")
        try:
            placed = self.placed(inputs)
            record.has_updated = True
            results, outputs = self.program.step(arrays, *placed)
            del arrays
            for array, content in zip(self.program.arrays, results, strict=True):
                device.write(array, content).result()
            outputs = jax.tree.map(np.asarray, outputs)
        finally:
            device.ledger.release(workspace)
        record.has_updated = False
        return outputs

    def evaluate(self, batch: Any, keys: Sequence[Any]) -> float:
        params = [
            self.stores.device.read(a).result()
            for a in self.program.arrays
            if a.role == "param"
        ]
        batches, stacked_keys = self.placed(self.inputs(batch, keys))
        return float(np.mean(self._evaluate(params, batches, stacked_keys)))

    def inputs(self, batch: Any, keys: Sequence[Any]) -> tuple[Any, Any]:
        cut = microbatches(batch, self.spec, self.count)
        columns = [np.stack([arrays[name] for arrays in cut]) for name in cut[0]]
        batches = jax.tree.unflatten(jax.tree.structure(self.spec), columns)
        return batches, jax.numpy.stack(list(keys)) if keys else None

    def placed(self, tree: Any) -> Any:
        return jax.device_put(tree, self.stores.device.device)


def switch(current: AbstractRunner | None, runner: AbstractRunner) -> AbstractRunner:
    """Makes `runner` the one that runs next, in place of `current`."""
    if runner is not current:
        if current is not None:
            current.leave()
        runner.enter()
    return runner


def make_runner(
    prepared: Streamed | Fused,
    planner: Planner,
    stores: Stores,
    spec: Any,
    before_update: Callable[[], None],
) -> AbstractRunner:
    """What runs a prepared step on batches of one shape.

    Args:
        spec: shapes and dtypes of one microbatch.
        before_update: called before a step changes the first array.
    """
    config = planner.config
    skips_overflow = config.loss_scaling is not None
    if isinstance(prepared, Streamed):
        prepared.updates.compile_in_place(prepared.units)
        return StreamedRunner(
            prepared,
            stores,
            spec,
            clip_norm=config.clip_norm,
            skips_overflow=skips_overflow,
            before_update=before_update,
        )
    return FusedRunner(
        prepared,
        stores,
        spec,
        planner.problem.evaluation,
        num_microbatches=config.num_microbatches,
        skips_overflow=skips_overflow,
        before_update=before_update,
    )
