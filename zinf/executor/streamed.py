"""Steps that run segment by segment, as a plan lists them."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from zinf.executor.batch import microbatches
from zinf.executor.decision import MIXED, UNTOUCHED, NonFiniteError, Pending, decide
from zinf.executor.joint import unit_parts
from zinf.executor.outcome import Outcome
from zinf.executor.prepare import Streamed
from zinf.executor.run import StepRecord, Work, run_plan
from zinf.executor.runner import AbstractRunner
from zinf.executor.scalars import Advance
from zinf.jaxpr.keys import to_words
from zinf.memory import Stores, to_devices
from zinf.optim.clipping import Clipping
from zinf.plan import Plan, build_evaluation, initial_copies, value
from zinf.program import ArrayId
from zinf.segment import KEY
from zinf.sharding import whole_layout


class StreamedRunner(AbstractRunner):
    def __init__(
        self,
        streamed: Streamed,
        stores: Stores,
        spec: Any,
        *,
        clipping: Clipping,
        skips_overflow: bool,
        before_update: Callable[[], None],
    ):
        self.streamed, self.stores, self.spec = streamed, stores, spec
        self.arranged = streamed.arranged
        self.plan = self.arranged.plan
        self.program = streamed.segmented.program
        self.layouts = streamed.layouts
        self.num_microbatches = streamed.arranged.options.num_microbatches
        self.clipping, self.skips_overflow = clipping, skips_overflow
        self.before_update = before_update
        self.read = {n for s in self.program.segments for n in s.inputs}
        self.pending: Pending | None = None
        updates, units = streamed.updates, self.arranged.units
        updates.compile_in_place(units)
        self.parts = unit_parts(updates, units, self.plan.homes)

    def enter(self) -> None:
        """Puts the arrays that the loss closed over on the device, where they stay.

        They may depend on the shape of the batch: a causal mask, say.
        """
        for name, content in self.streamed.segmented.consts.items():
            self.put_on_device(ArrayId("const", name), content)

    def leave(self) -> None:
        for name in self.streamed.segmented.consts:
            self.stores.device.free(ArrayId("const", name))

    def step(
        self,
        batch: Any,
        keys: Sequence[Any],
        *,
        advance: Advance,
        loss_scale: float,
        record: StepRecord,
    ) -> Outcome:
        first = self.arranged.first
        plan = self.plan if first is None or self.pending else first
        work = self.work(loss_scale, advance.values)
        loss_dtype = self.program.values[self.program.loss].dtype
        seed = np.asarray(
            loss_scale / self.num_microbatches, dtype=jax.numpy.dtype(loss_dtype)
        )
        (seed,) = to_devices([seed], [whole_layout((), self.layouts.mesh)])
        with self.pending_settled(record):
            losses, extra = self.run(plan, work, batch, keys, seed, record)
        decision = record.decision
        assert decision is not None
        if first is not None:
            self.pending = Pending(decision, advance.values(decision.loss))
            if decision.skips:
                self.drop_pending()
        if decision.refusal:
            record.is_mixed = record.has_updated
            state = MIXED if record.is_mixed else UNTOUCHED
            raise NonFiniteError(f"{decision.refusal} {state}")
        assert decision.grad_norm is not None
        return Outcome(
            losses,
            decision.grad_norm,
            decision.skips,
            extra,
            record.interrupted,
            record.moved_bytes,
        )

    def flush(self, record: StepRecord) -> None:
        if self.pending is None:
            return
        assert self.arranged.flush is not None
        with self.pending_settled(record):
            work = self.work(1.0)
            run_plan(self.arranged.flush, work, self.stores, None, record)
        if record.interrupted:
            raise KeyboardInterrupt

    @contextmanager
    def pending_settled(self, record: StepRecord) -> Generator[None, None, None]:
        """What was pending is done, gone with a step that failed after it began, or
        still pending after one that failed before."""
        try:
            yield
        except BaseException:
            if record.has_begun:
                self.drop_pending()
            raise
        self.pending = None

    def drop_pending(self) -> None:
        if self.pending is not None:
            self.pending = None
            for array, tier in self.arranged.pending:
                # Of a step that failed, some are used up already.
                if self.stores[tier].contains(array):
                    self.stores[tier].free(array)

    def evaluate(self, batch: Any, keys: Sequence[Any]) -> float:
        assert self.pending is None, "evaluation reads finished updates"
        work, record = self.work(1.0), StepRecord()
        losses, _ = self.run(self._evaluation_plan, work, batch, keys, None, record)
        if record.interrupted:
            raise KeyboardInterrupt
        return sum(losses) / len(losses)

    @cached_property
    def _evaluation_plan(self) -> Plan:
        workspace = self.streamed.segments[-1].evaluation_bytes()
        return build_evaluation(
            self.arranged.catalog, self.plan, workspace, self.num_microbatches
        )

    def work(
        self,
        loss_scale: float,
        step_values: Callable[[float], Sequence[Any]] = lambda loss: (),
    ) -> Work:
        updates = self.streamed.updates
        return Work(
            program=self.program,
            segments=self.streamed.segments,
            units=self.arranged.units,
            parts=self.parts,
            update=updates.apply,
            is_in_place=updates.is_in_place,
            update_in_place=updates.apply_in_place,
            step_values=step_values,
            pending=self.pending,
            decide=partial(
                decide,
                clipping=self.clipping,
                loss_scale=loss_scale,
                skips_overflow=self.skips_overflow,
            ),
            before_update=self.before_update,
            compute_dtype=self.streamed.compute_dtype,
            layouts=self.layouts,
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
            for array, tier in initial_copies(self.program, self.arranged.options):
                if self.stores[tier].contains(array):
                    self.stores[tier].free(array)
            raise
        return self.take()

    def put(self, batch: Any, keys: Sequence[Any]) -> None:
        """Stores the inputs that segments read: the batch on the host, keys on the
        device."""
        for m, arrays in enumerate(
            microbatches(batch, self.spec, self.num_microbatches)
        ):
            for name, array in arrays.items():
                if name in self.read:
                    self.stores.host.write(value(name, m), array).result()
        for m, key in enumerate(keys):
            if KEY in self.read:
                self.put_on_device(value(KEY, m), to_words(key))

    def put_on_device(self, array: ArrayId, content: Any) -> None:
        """Writes something that is the same on every process to the devices."""
        layouts = [self.layouts.of(array)]
        (placed,) = to_devices([np.asarray(content)], layouts)
        self.stores.device.write(array, placed).result()

    def take(self) -> tuple[list[float], Any]:
        """Removes the results of a step from the host store."""
        columns: list[list[np.ndarray]] = []
        for m in range(self.num_microbatches):
            column = []
            for name in (self.program.loss, *self.program.aux):
                array = value(name, m)
                column.append(np.array(self.stores.host.read(array).result()))
                self.stores.host.free(array)
            columns.append(column)
        losses, *extra = (np.stack(rows) for rows in zip(*columns, strict=True))
        structure = self.streamed.segmented.aux_structure
        return [float(x) for x in losses], jax.tree.unflatten(structure, extra)
