"""Runs streamed steps: segment by segment, in the order of a plan."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from zinf.core.memory import Stores, to_devices
from zinf.core.optim.advance import Advance
from zinf.core.optim.clipping import Clipping
from zinf.core.optim.decision import Decision, Pending, decide
from zinf.core.sharding import whole_layout
from zinf.core.step.planner import Planner, Streamed
from zinf.core.step.run.gradient import read_gradient
from zinf.core.step.run.outcome import Outcome, outcome_of
from zinf.core.step.run.passes import Passes
from zinf.core.step.run.run import Squares, StepRecord, Work, run_plan
from zinf.core.step.run.runner import AbstractRunner


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
        self.num_microbatches = streamed.arranged.options.num_microbatches
        self.passes = Passes(
            streamed.segmented,
            streamed.segments,
            streamed.layouts,
            stores,
            spec,
            self.num_microbatches,
        )
        self.weight = streamed.weight
        self.clipping, self.skips_overflow = clipping, skips_overflow
        self.before_update = before_update
        self.pending: Pending | None = None
        self.pending_scale = 1.0  # loss scale of the gradients at rest
        streamed.updates.compile_in_place(self.arranged.units)

    def enter(self) -> None:
        self.passes.put_consts()

    def leave(self) -> None:
        self.passes.free_consts()

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
        weight = self.step_weight(batch, keys)

        def step_values(decision: Decision, squares: Squares) -> Sequence[Any]:
            return advance.values(decision.loss, decision.factor, squares)

        work = self.work(loss_scale, step_values, weight=weight)
        program, layouts = self.passes.program, self.passes.layouts
        loss_dtype = program.values[program.loss].dtype
        seed = np.asarray(loss_scale / weight, dtype=jax.numpy.dtype(loss_dtype))
        (seed,) = to_devices([seed], [whole_layout((), layouts.mesh)])
        with self.pending_settled(record):
            outputs = self.passes.run(plan, work, batch, keys, seed, record)
        _, extra = self.passes.stacked(outputs)
        decision = record.decision
        assert decision is not None
        if first is not None:
            self.pending_scale = loss_scale
            self.pending = Pending(decision, advance.values(decision.loss))
            if decision.skips:
                self.drop_pending()
        return outcome_of(record, extra)

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
        """Settles the deferred updates when the body, which runs them, ends.

        If the body succeeds, they are done. If it fails after the first of them began,
        they are dropped. If it fails before that, they stay pending.
        """
        try:
            yield
        except BaseException:
            if record.ran_pending:
                self.drop_pending()
            raise
        self.pending = None

    def drop_pending(self) -> None:
        if self.pending is not None:
            self.pending = None
            for array, tier in self.arranged.pending:
                # A step that failed may have freed some of them already.
                if self.stores[tier].contains(array):
                    self.stores[tier].free(array)

    def gradient(self, planner: Planner, path: str) -> np.ndarray | None:
        if self.pending is None:
            return None
        at_rest, layouts = self.arranged.pending, self.passes.layouts
        found = read_gradient(planner, self.stores, layouts, at_rest, path)
        return None if found is None else found / np.float32(self.pending_scale)

    def work(
        self,
        loss_scale: float,
        step_values: Callable[[Decision, Squares], Sequence[Any]] = lambda *_: (),
        *,
        weight: float = 1.0,
    ) -> Work:
        updates = self.streamed.updates
        return Work(
            segments=self.passes.segments,
            units=self.arranged.units,
            joint=self.streamed.joint,
            update=updates.apply,
            is_in_place=updates.is_in_place,
            update_in_place=updates.apply_in_place,
            step_values=step_values,
            pending=self.pending,
            decide=partial(
                decide,
                clipping=self.clipping,
                loss_scale=loss_scale,
                weight=weight,
                skips_overflow=self.skips_overflow,
            ),
            before_update=self.before_update,
            compute_dtype=self.streamed.compute_dtype,
            layouts=self.passes.layouts,
        )
