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
from zinf.executor.outcome import Outcome
from zinf.executor.prepare import Fused, Planner, Streamed
from zinf.executor.run import StepRecord, Work, run_plan
from zinf.memory import Stores
from zinf.plan import Plan, build_evaluation, value
from zinf.program import ArrayId, Tier
from zinf.segment import KEY


class AbstractRunner(ABC):
    """Runs steps of one plan on microbatches of one shape (`spec`)."""

    plan: Plan
    spec: Any

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
        self.put(batch, keys)
        run_plan(self.plan, work, self.stores, seed, record)
        losses, extra = self.take()
        decision = record.decision
        assert decision is not None and decision.grad_norm is not None
        return Outcome(
            losses,
            decision.grad_norm,
            decision.skips,
            extra,
            record.interrupted,
            record.moved_bytes,
            record.busy_seconds,
        )

    def evaluate(self, batch: Any, keys: Sequence[Any]) -> float:
        self.put(batch, keys)
        work = self.work(1.0, ())
        record = StepRecord()
        run_plan(self._evaluation_plan, work, self.stores, None, record)
        losses, _ = self.take()
        if record.interrupted:
            raise KeyboardInterrupt
        return sum(losses) / len(losses)

    @cached_property
    def _evaluation_plan(self) -> Plan:
        workspace = self.streamed.segments[-1].evaluation_bytes()
        return build_evaluation(self.streamed.catalog, self.plan, workspace, self.count)

    def work(self, loss_scale: float, step_values: Sequence[Any]) -> Work:
        return Work(
            program=self.program,
            segments=self.streamed.segments,
            units=self.streamed.units,
            update=partial(self.streamed.updates.apply, step_values),
            decide=partial(
                decide,
                clip_norm=self.clip_norm,
                loss_scale=loss_scale,
                skips_overflow=self.skips_overflow,
            ),
            before_update=self.before_update,
            compute_dtype=self.streamed.compute_dtype,
        )

    def put(self, batch: Any, keys: Sequence[Any]) -> None:
        """Stores the inputs that segments read: the batch on the host, keys on the
        device."""
        for m, arrays in enumerate(microbatches(batch, self.spec, self.count)):
            for name, array in arrays.items():
                if name in self.read:
                    self.stores.host.write(value(name, m), array).result()
        for m, key in enumerate(keys):
            if KEY in self.read:
                key = jax.device_put(key, self.stores.device.device)
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
        ((tier, workspace),) = self.plan.instructions[0].workspace
        device = self.stores[tier]
        arrays = [device.read(a).result() for a in self.program.arrays]
        device.ledger.reserve(workspace, "the fused step")
        try:
            inputs = (
                *self.inputs(batch, keys),
                list(step_values),
                np.float32(loss_scale),
            )
            record.has_updated = True
            results, outputs = self.program.step(arrays, *self.placed(inputs))
            del arrays
            for array, content in zip(self.program.arrays, results, strict=True):
                device.write(array, content).result()
            outputs = jax.tree.map(np.asarray, outputs)
        finally:
            device.ledger.release(workspace)
        record.has_updated = False
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
        return Outcome(losses, norm, skips, outputs["extra"])

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


def put_consts(streamed: Streamed, stores: Stores) -> None:
    """Puts the arrays that the loss closed over on the device, where they stay."""
    for name, content in streamed.segmented.consts.items():
        array = ArrayId("const", name)
        if not stores[Tier.DEVICE].contains(array):
            stores.device.write(array, jax.numpy.asarray(content)).result()


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
        put_consts(prepared, stores)
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
