"""Streamed steps, which run segment by segment in the order of a plan."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import numpy as np

from zinf.core.config import Config
from zinf.core.memory import Stores, to_devices
from zinf.core.memory.host.pages import open_pages
from zinf.core.optim.advance import Advance
from zinf.core.optim.clipping import Clipping
from zinf.core.optim.decision import Decision, Pending, decide
from zinf.core.plan import (
    Arrangement,
    ArrayUpdate,
    Choices,
    Instruction,
    Pass,
    Run,
    SumParts,
    Update,
    build_updates,
    prove,
    retimed,
)
from zinf.core.plan.check import check_groups
from zinf.core.plan.show import show_tilings
from zinf.core.problem.weighted import Weighted, num_rows
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.segment import Segment, Segmented
from zinf.core.sharding import whole_layout
from zinf.core.sharding.mesh import local_devices
from zinf.core.step.arrays import kept_off_nvme
from zinf.core.step.earlier_plan import EarlierPlan, Step
from zinf.core.step.forward import forward_of
from zinf.core.step.joint import Joint, grouped, jointly_and_singly
from zinf.core.step.part_sums import PartSums
from zinf.core.step.prepared import AbstractPrepared, Measure
from zinf.core.step.run.chosen import ChosenExperts
from zinf.core.step.run.evaluation import evaluation_by_segment
from zinf.core.step.run.forward import ForwardRunner
from zinf.core.step.run.gradient import read_gradient
from zinf.core.step.run.outcome import Outcome, outcome_of
from zinf.core.step.run.passes import Passes
from zinf.core.step.run.run import Squares, StepRecord, Work, run_plan
from zinf.core.step.run.runner import AbstractRunner, Evaluate
from zinf.core.step.setup import AtRest, Setup
from zinf.core.step.shrink import Compiled, Limits
from zinf.core.step.updates import Updates, compile_program_updates

FORWARD = {Pass.FORWARD, Pass.KEEPING}


@dataclass(frozen=True, kw_only=True)
class Streamed(AbstractPrepared):
    """A step that runs segment by segment.

    Attributes:
        arranged: the plans, of which `plan` is one, and what they are built from.
        limits: those of the segments.
        choices: what a search by measured rates may choose.
        earlier: the place of what such a search chose in an earlier start.
    """

    arranged: Arrangement
    segmented: Segmented
    segments: tuple[Segment, ...]
    updates: Updates
    part_sums: PartSums
    joint: Joint
    compute_dtype: Any
    limits: Limits
    choices: Choices
    earlier: EarlierPlan

    @property
    def in_parts(self) -> frozenset[str]:
        segments = self.segmented.program.segments
        exchanged = {a for s in segments for a in s.in_parts}
        others = {a for s in segments for a in s.trained_params if a not in s.in_parts}
        return frozenset(a.path for a in exchanged) - {a.path for a in others}

    @property
    def tiled(self) -> str:
        return show_tilings(self.segmented.program)

    def retimed(self, setup: Setup, measure: Measure, batch: Any) -> Self:
        # Homes and residuals stay as the rates of `setup` chose them: saved residuals
        # may round differently, and measured rates differ from run to run.
        rates = measure(self, setup, batch)
        before, units, choices = self.arranged, self.updates.units, self.choices
        catalog, options = replace(before.catalog, rates=rates), before.options
        step = Step(catalog, (), units, before.plan.capacity_bytes, options, choices)
        arranged = self.earlier.then(rates).arranged(
            step, lambda: retimed(before, units, rates, choices)
        )
        arranged, joint = grouped(arranged, self.updates)
        prove(arranged)
        return replace(self, plan=arranged.plan, arranged=arranged, joint=joint)

    def warning(self, config: Config) -> str | None:
        return kept_off_nvme(self.plan.homes, self.arranged.catalog.specs, config)

    def store_options(self, setup: Setup) -> dict[str, Any]:
        devices = local_devices(setup.rule.mesh)
        needed, gather = self.plan.peak_bytes[Tier.HOST], setup.group.gather
        pages = open_pages(setup.config.pinned, devices, needed, gather)
        return {"pages": pages, **_own_folders(setup.config.nvme_options)}

    def runner(
        self, setup: Setup, stores: Stores, spec: Any, before_step: Callable[[], None]
    ) -> "StreamedRunner":
        # A step waits for each array that it changes, and not for a whole save.
        rest = {"clipping": setup.clipping, "skips_overflow": setup.config.may_skip}
        return StreamedRunner(self, stores, spec, **rest)

    def updating(self, setup: Setup) -> "Updating":
        program, before = self.segmented.program, self.arranged
        separated, layouts = setup.separated, self.layouts
        updates = compile_program_updates(
            program,
            setup.problem,
            separated,
            accumulates={a for s in program.segments for a in s.trained_params},
            layouts=layouts,
            gradient_role=Role.SUM,
        )
        homes = before.catalog.homes.items()
        catalog = replace(
            before.catalog,
            homes={a: tier for a, tier in homes if a.role != Role.CONST},
            norm_classes=separated.norm_groups.classes,
        )
        gradients = {
            segment: list(dict.fromkeys(x.gradient for x in some))
            for segment, some in updates.arrays
        }
        rest = updates.units, gradients, before.plan.capacity_bytes
        arranged, joint = grouped(build_updates(catalog, *rest), updates)
        check_groups(arranged.plan)
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        own |= {"arranged": arranged, "updates": updates, "joint": joint}
        return Updating(**own | {"plan": arranged.plan, "weight": None})

    def executables(self) -> Iterator[tuple[Instruction, Any, int | None]]:
        catalog, steps = self.arranged.catalog, self.updates.steps[Tier.DEVICE]
        for instruction in self.plan.instructions:
            operation = instruction.operation
            if isinstance(operation, Run):
                segment = self.segments[operation.segment]
                is_kept = operation.kind in (Pass.KEEPING, Pass.KEPT)
                passes = segment.keeping if is_kept else segment.executables
                is_forward = operation.kind in FORWARD
                copies = (*instruction.reads, *instruction.writes)
                nbytes = sum(catalog.nbytes(array, tier) for array, tier in copies)
                code = passes.forward if is_forward else passes.backward
                yield instruction, code, nbytes
            elif isinstance(operation, SumParts):
                for source, target, errors in zip(
                    operation.parts, operation.targets, operation.errors, strict=True
                ):
                    arrays = source, target, *errors, *errors
                    nbytes = sum(catalog.nbytes(a, Tier.DEVICE) for a in arrays)
                    yield instruction, self.part_sums.steps[target], nbytes
            elif isinstance(operation, Update) and operation.tier == Tier.DEVICE:
                units = self.arranged.units
                together, single = jointly_and_singly(operation, units, self.joint)
                for joint in together:
                    nbytes = sum(map(self._update_bytes, joint.arrays))
                    yield instruction, joint.step.executable, nbytes
                for update in single:
                    code = steps[update].executable
                    yield instruction, code, self._update_bytes(update)

    def _update_bytes(self, update: ArrayUpdate) -> int:
        """Bytes that an update reads and writes on one device, as the plan counts."""

        def device_bytes(array: ArrayId) -> int:
            nbytes = self.arranged.catalog.nbytes(array, Tier.DEVICE)
            # An update makes only the part of a copy that a device keeps itself.
            return nbytes // self.layouts.of(array).num_groups

        own = self.updates.own_parts.get(update)
        rows = update.block or update.gradient.rows
        gradient = update.gradient.piece(rows)
        nbytes = device_bytes(gradient) if own is None else own.nbytes
        return nbytes + sum(map(device_bytes, (*update.operands, *update.results)))


def _own_folders(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with NVMe folders of this process alone: processes may share drives."""
    if jax.process_count() == 1:
        return options
    name = f"process-{jax.process_index()}"
    paths = [path / name for path in options["nvme_paths"]]
    return {**options, "nvme_paths": paths}


class StreamedRunner(AbstractRunner):
    def __init__(
        self,
        streamed: Streamed,
        stores: Stores,
        spec: Any,
        *,
        clipping: Clipping,
        skips_overflow: bool,
    ):
        self.streamed, self.stores, self.spec = streamed, stores, spec
        self.arranged = streamed.arranged
        self.plan = streamed.plan
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
        self.chosen: ChosenExperts | None = None
        self.pending: Pending | None = None
        self.pending_scale = 1.0  # loss scale of the gradients at rest
        streamed.updates.compile_in_place(self.arranged.units)

    def enter(self) -> None:
        self.passes.put_consts()
        self.chosen = self.passes.chosen()
        if self.chosen is not None:
            self.chosen.forget_others()

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
        """Settles the deferred updates after the `with` block, which runs them.

        If the block succeeds, they are done. If it fails after the first of them began,
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

    def evaluation(self, setup: Setup, spec: Any) -> Evaluate:
        streamed = self.streamed
        is_same = jax.tree.flatten(self.spec) == jax.tree.flatten(spec)
        if setup.problem.evaluation_loss is None and is_same:
            return self._as_in_training(setup)
        at_rest = AtRest(self.plan.homes, streamed.layouts)
        rest = setup, self.stores, spec, at_rest
        return evaluation_by_segment(*rest, limits=streamed.limits)

    def _as_in_training(self, setup: Setup) -> Evaluate:
        """An evaluation by the executables of training, which return no weight."""
        streamed = self.streamed
        compiled = Compiled(streamed.segments, streamed.layouts)
        forward = forward_of(setup, self.arranged, streamed.segmented, compiled)
        runner = ForwardRunner(forward, self.stores, self.spec)

        def by_segment(
            batch: Any, keys: Sequence[Any], current: AbstractRunner
        ) -> Weighted:
            losses = [float(loss) for loss, *_ in runner.run(batch, keys, current)]
            if self.weight is not None:
                return Weighted(sum(losses), self.step_weight(batch, keys))
            num_samples = num_rows(self.spec)
            return Weighted(sum(losses) * num_samples, len(losses) * num_samples)

        return by_segment

    def gradient(self, path: str) -> np.ndarray | None:
        if self.pending is None:
            return None
        at_rest, layouts = self.arranged.pending, self.passes.layouts
        found = read_gradient(self.stores, layouts, at_rest, path)
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
            sum_parts=self.streamed.part_sums,
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
            compute_dtype=self.streamed.compute_dtype,
            chosen=self.chosen,
            layouts=self.passes.layouts,
        )


@dataclass(frozen=True, kw_only=True)
class Updating(Streamed):
    """The updates from sums of gradients alone, which run no segment."""

    def runner(
        self, setup: Setup, stores: Stores, spec: Any, before_step: Callable[[], None]
    ) -> "UpdatingRunner":
        rest = {"clipping": setup.clipping, "skips_overflow": False}
        return UpdatingRunner(self, stores, spec, **rest)


class UpdatingRunner(StreamedRunner):
    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def step(
        self,
        batch: Any,
        keys: Sequence[Any],
        *,
        advance: Advance,
        loss_scale: float,
        record: StepRecord,
    ) -> Outcome:
        def step_values(decision: Decision, squares: Squares) -> Sequence[Any]:
            return advance.values(decision.loss, decision.factor, squares)

        work = self.work(loss_scale, step_values)
        run_plan(self.plan, work, self.stores, None, record)
        return outcome_of(record, {})
