"""Executes the instructions of a plan: transfers, segments, updates.

This module decides nothing. The plan decides where and when an array goes, and which
copies an instruction makes; the stores decide how an array is stored; the segments and
the optimizer decide what is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np

from zinf.core.memory import (
    Stores,
    as_rows_rest,
    has_host_memory,
    in_device_form,
)
from zinf.core.optim.decision import Decision, Pending
from zinf.core.plan import (
    Accumulate,
    ArrayUpdate,
    Copy,
    Decide,
    FetchChosen,
    Free,
    Instruction,
    Link,
    Pass,
    Plan,
    Run,
    SumParts,
    SumSquares,
    Timeline,
    Transfer,
    Update,
    UpdateUnit,
)
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.segment import Segment
from zinf.core.sharding import Layouts
from zinf.core.step.joint import Joint, JointUpdate, jointly_and_singly
from zinf.core.step.run.chosen import ChosenExperts
from zinf.core.step.run.links import Progress, Wait, run_links
from zinf.core.step.run.transfer import Mover
from zinf.core.step.sums import accumulated, accumulated_rows, sum_squares

UpdateFunction = Callable[..., Sequence[Any]]
Squares = Sequence[tuple[int, float]]


def _none(*_: Any) -> Any:
    raise AssertionError("a forward pass has no updates and no decision")


@dataclass(frozen=True, kw_only=True)
class Work:
    """The segments and functions that the operations of a plan refer to.

    A plan that only runs forward has no updates and no decision. It needs only
    `segments` and `layouts`.

    `decided` is a `Pending`: the decision and the step values that an update reads.

    Attributes:
        joint: what runs the groups of updates that run together.
        sum_parts: `(array that is written, parts, errors) -> sum over devices, new
            errors`.
        update: `(array update, tier, gradient, operands, decided) -> results` computes
            the new values of an array update's results.
        is_in_place: `(array update, tier)`: whether to call `update_in_place` instead
            of `update`.
        update_in_place: `(array update, gradient, decided, *results)` overwrites the
            results; it gets their host memory.
        step_values: `(decision, squares) -> step values` for the updates of this step;
            squares are those of gradients with the class of their leaves
            (`NormGroups`).
        pending: `decided` of the updates that the step before deferred.
        decide: `(losses, sums of squares or None) -> Decision`.
        compute_dtype: dtype of the compute copies, if masters are stored separately.
        chosen: the experts that are read on demand; None if there are none.
        layouts: layouts of all arrays that move between host and devices.
    """

    segments: Sequence[Segment]
    units: Sequence[UpdateUnit] = ()
    joint: Joint = field(default_factory=dict)
    sum_parts: Callable[[ArrayId, Any, Sequence[Any]], Any] = _none
    update: UpdateFunction = _none
    is_in_place: Callable[[ArrayUpdate, Tier], bool] = _none
    update_in_place: Callable[..., None] = _none
    step_values: Callable[[Decision, Squares], Sequence[Any]] = _none
    pending: Pending | None = None
    decide: Callable[[Sequence[float], Sequence[float] | None], Decision] = _none
    compute_dtype: Any = None
    chosen: ChosenExperts | None = None
    layouts: Layouts


@dataclass
class StepRecord:
    """What one step did, apart from its results.

    Attributes:
        plan: the plan that ran.
        number: the number of steps before this one.
        timeline: when each instruction of the plan ran; None if the step is not
            complete.
        has_updated: an update from this step's own gradients was begun.
        is_mixed: the step failed after some arrays were updated and before all were.
        ran_pending: an update that the step before deferred was begun.
    """

    plan: Plan | None = None
    number: int = 0
    decision: Decision | None = None
    has_updated: bool = False
    is_mixed: bool = False
    ran_pending: bool = False
    moved_bytes: dict[Link, int] = field(default_factory=lambda: dict.fromkeys(Link, 0))
    timeline: Timeline | None = None
    interrupted: bool = False


def run_plan(
    plan: Plan, work: Work, stores: Stores, seeds: Any, record: StepRecord
) -> None:
    """Run one step. It reads its inputs from the stores and leaves its results there.

    Args:
        seeds: the cotangent of the loss (loss scale over number of microbatches).
        record: filled in while the step runs, also if the step fails.

    Raises:
        the error of the first instruction that failed, with a note that names it. All
        copies that the plan made are freed; `record` says whether the arrays at home
        were updated.
    """
    run = _StepRun(work, stores, seeds, record, plan)
    progress = Progress(len(plan.instructions))
    record.plan = plan
    try:
        run_links(
            plan.instructions,
            run.execute,
            progress,
            programs_at_once=run.programs_at_once,
        )
    except BaseException:
        run.drop_copies()
        pending = [progress.has_begun(i) for i in plan.pending_changes]
        own = [progress.has_begun(i) for i in plan.own_changes]
        is_done = all(map(progress.is_complete, plan.pending_changes))
        record.is_mixed = any(own) or (any(pending) and not is_done)
        record.ran_pending = any(pending)
        raise
    record.ran_pending = bool(plan.pending_changes)
    record.timeline = progress.timeline
    record.interrupted = progress.interrupted


def run_alone(
    instruction: Instruction,
    plan: Plan,
    work: Work,
    stores: Stores,
    seeds: Any,
    decided: Pending,
) -> None:
    """Run one instruction of a plan; the stores have what it reads.

    Args:
        decided: the decision and step values of updates, instead of those of a step.
    """
    record = StepRecord(plan, decision=decided.decision)
    run = _StepRun(work, stores, seeds, record, plan)
    run.step_values = decided.step_values
    if (wait := run.execute(instruction)) is not None:
        wait()


def programs_at_once(device: jax.Device) -> int:
    """How many programs a device has at most: one runs, and one waits behind it.

    More would delay transfers ([Note: ahead]). A device of the CPU backend gets one at
    a time. It runs programs at the same time if they do not depend on each other, and
    then takes more memory than the plan counts.
    """
    return 1 if has_host_memory(device) else 2


class _StepRun:
    def __init__(
        self,
        work: Work,
        stores: Stores,
        seed: Any,
        record: StepRecord,
        plan: Plan,
    ):
        self.work, self.stores, self.seed, self.record = work, stores, seed, record
        # Copies that this run made and has not freed.
        self.copies: set[Copy] = set()
        self.mover = Mover(stores, work.layouts, plan.shared)
        self.step_values: Sequence[Any] = ()
        self.programs_at_once = programs_at_once(stores.device.device)
        self.runs_ahead = self.programs_at_once > 1
        # Of the last instruction of the device link, bytes that are not released.
        self.workspace: list[tuple[Tier, int]] = []

    def execute(self, instruction: Instruction) -> Wait | None:
        """Run an instruction, or give its programs to the devices.

        Returns what waits until they are complete; None if the instruction is.
        """
        self.copies.update(instruction.creates)
        if instruction.link == Link.DEVICE:
            # Its programs use this memory after those of the last instruction.
            self.release(self.workspace)
        workspace: list[tuple[Tier, int]] = []
        computed: Sequence[jax.Array] = ()
        try:
            for tier, nbytes in instruction.workspace:
                self.stores[tier].ledger.reserve(nbytes, str(instruction.operation))
                workspace.append((tier, nbytes))
            computed = self.begin(instruction)
        finally:
            if not computed:
                self.release(workspace)
        if not computed:
            return None
        self.workspace = workspace
        return partial(self.complete, computed, workspace)

    def complete(
        self, computed: Sequence[jax.Array], workspace: list[tuple[Tier, int]]
    ) -> None:
        try:
            jax.block_until_ready(computed)
        finally:
            self.release(workspace)

    def release(self, workspace: list[tuple[Tier, int]]) -> None:
        """Release bytes, unless the other thread that may do so has."""
        while workspace:
            try:
                tier, nbytes = workspace.pop()
            except IndexError:
                return
            self.stores[tier].ledger.release(nbytes)

    def begin(self, instruction: Instruction) -> Sequence[jax.Array]:
        """Returns results of all programs that may not be complete yet."""
        operation = instruction.operation
        computed: Sequence[jax.Array] = ()
        match operation:
            case Transfer():
                self.stores.heap.relieve(instruction.allocates)
                self.mover.move(operation)
                self.record.moved_bytes[instruction.link] += instruction.nbytes
            case Run():
                new = (*instruction.allocates, *instruction.workspace)
                self.stores.heap.relieve(new)
                computed = self.run(operation, instruction)
            case FetchChosen():
                assert self.work.chosen is not None
                given = operation, instruction, self.stores
                moved = self.work.chosen.fetch(*given)
                self.record.moved_bytes[instruction.link] += moved
            case Accumulate():
                computed = self.accumulate(operation, instruction.creates)
            case SumParts():
                computed = self.sum_parts(operation)
            case SumSquares():
                computed = self.sum_squares(operation)
            case Decide():
                self.decide(operation)
            case Update():
                computed = self.update(operation, instruction.creates)
            case Free():
                for array in operation.arrays:
                    self.stores[operation.tier].free(array)
                    self.copies.discard((array, operation.tier))
                self.stores.heap.relieve()
            case _:
                raise AssertionError(f"no way to execute {operation}")
        return computed

    def read(self, array: ArrayId, tier: Tier) -> Any:
        return self.stores[tier].read(array).result()

    def read_there(self, array: ArrayId, tier: Tier) -> Any:
        """The content of `array` on `tier`, in the form that an executable reads.

        A device array that came as shares of the processes is gathered, and the
        gathered content replaces the shares in the store.
        """
        content = self.read(array, tier)
        if tier != Tier.DEVICE or self.work.layouts.mesh.size == 1:
            return content
        gathered = in_device_form(content, self.work.layouts.of(array))
        if gathered is not content:
            self.write_computed([(array, tier)], [gathered])
        return gathered

    def write(self, array: ArrayId, tier: Tier, content: Any) -> None:
        if tier == Tier.DEVICE:
            device, layouts = self.stores.device, self.work.layouts
            content = as_rows_rest(device, array, content, layouts)
        self.stores[tier].write(array, content).result()

    def write_computed(
        self, copies: Sequence[Copy], contents: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Write what a program computes to copies.

        Returns what the program is complete with: if the device link runs ahead, the
        smallest of the contents. Else it is complete on return.
        """
        waits = not self.runs_ahead
        try:
            for copy, content in zip(copies, contents, strict=True):
                self.write(*copy, content)
        except BaseException:
            waits = True
            raise
        finally:
            # Later instructions may free the inputs of the computation.
            if waits:
                jax.block_until_ready(contents)
        return [] if waits else sorted(contents, key=lambda x: x.nbytes)[:1]

    def drop_copies(self) -> None:
        # After a failed instruction the store may or may not contain its copies. Wholes
        # are freed first, because a store that has a whole also contains its rows.
        for array, tier in sorted(self.copies, key=lambda copy: bool(copy[0].rows)):
            if self.stores[tier].contains(array):
                self.stores[tier].free(array)
        self.copies.clear()

    def run(self, operation: Run, instruction: Instruction) -> list[jax.Array]:
        segment = self.work.segments[operation.segment]
        spec = segment.spec
        is_backward = operation.kind in (Pass.BACKWARD, Pass.KEPT)
        read = spec.read_backward if is_backward else spec.params
        copies = iter(instruction.reads)
        params = [self.read_there(*copy) for copy in islice(copies, len(read))]
        inputs = [self.read(*copy) for copy in islice(copies, len(spec.inputs))]
        rest = [self.read(*copy) for copy in copies]
        results: tuple[Sequence[Any], ...]
        match operation.kind:
            case Pass.FORWARD:
                results = (segment.forward(params, inputs, rest),)
            case Pass.KEEPING:
                results = segment.forward_keeping(params, inputs)
            case Pass.LOSS:
                results = segment.loss(params, inputs, self.seed)
            case Pass.BACKWARD:
                results = segment.backward(params, inputs, rest)
            case Pass.KEPT:
                count = len(spec.active_outputs)
                cotangents, residuals = rest[:count], rest[count:]
                results = segment.backward_from(params, inputs, residuals, cotangents)
        contents = [x for some in results for x in some]
        return self.write_computed(instruction.writes, contents)

    def accumulate(
        self, operation: Accumulate, creates: Sequence[Copy]
    ) -> list[jax.Array]:
        numbers, computed = dict(operation.row_numbers), []
        for target, source in zip(operation.targets, operation.sources, strict=True):
            copy = target, Tier.DEVICE
            part = self.read(source, Tier.DEVICE)
            total = None if copy in creates else self.read(*copy)
            if source in numbers:
                layout = self.work.layouts.of(target)
                rows = part, self.read(numbers[source], Tier.DEVICE)
                total = accumulated_rows(total, *rows, layout)
            else:
                is_wide = target.role in (Role.GRADIENT, Role.PARTS)
                total = accumulated(total, part, is_wide=is_wide)
            computed += self.write_computed([copy], [total])
        return computed

    def sum_parts(self, operation: SumParts) -> list[jax.Array]:
        computed = []
        for source, target, errors in zip(
            operation.parts, operation.targets, operation.errors, strict=True
        ):
            parts = self.read(source, Tier.DEVICE)
            before = [self.read_there(a, Tier.DEVICE) for a in errors]
            total, after = self.work.sum_parts(target, parts, before)
            copies = [(a, Tier.DEVICE) for a in (target, *errors)]
            computed += self.write_computed(copies, [total, *after])
        return computed

    def sum_squares(self, operation: SumSquares) -> list[jax.Array]:
        gradients = [self.read(a, Tier.DEVICE) for a in operation.gradients]
        target = operation.target, Tier.DEVICE
        return self.write_computed([target], [sum_squares(gradients)])

    def decide(self, operation: Decide) -> None:
        losses = [float(self.read(a, Tier.HOST)) for a in operation.losses]
        norms = [float(self.read(a, Tier.HOST)) for a in operation.norms]
        decision = self.work.decide(losses, norms or None)
        classes = [array.slot or 0 for array in operation.norms]
        squares = list(zip(classes, norms, strict=True))
        self.step_values = self.work.step_values(decision, squares)
        self.record.decision = decision

    def update(self, operation: Update, creates: Sequence[Copy]) -> list[jax.Array]:
        decided = self.decided_for(operation)
        if decided.decision.skips:
            self.refresh(self.work.units[operation.unit].arrays, creates)
            return []
        self.record.has_updated |= not operation.is_pending
        units, joint = self.work.units, self.work.joint
        together, single = jointly_and_singly(operation, units, joint)
        computed = []
        for each in together:
            computed += self.update_jointly(each, decided)
        for array_update in single:
            given = array_update, operation.tier, decided, creates
            computed += self.update_array(*given)
        return computed

    def decided_for(self, operation: Update) -> Pending:
        if operation.is_pending:
            assert self.work.pending is not None
            return self.work.pending
        assert self.record.decision is not None
        return Pending(self.record.decision, self.step_values)

    def refresh(self, updates: Sequence[ArrayUpdate], creates: Sequence[Copy]) -> None:
        """Make the compute copies that a skipped update would make.

        The plan moves these copies next, with or without an update.
        """
        masters = {u.compute: u.master for u in updates if u.compute is not None}
        for compute, tier in creates:
            master = self.read(masters[compute], tier)
            self.write(compute, tier, master.astype(self.work.compute_dtype))

    def update_array(
        self,
        array_update: ArrayUpdate,
        tier: Tier,
        decided: Pending,
        creates: Sequence[Copy],
    ) -> list[jax.Array]:
        gradient = self.gradient_block(array_update, tier)
        if self.work.is_in_place(array_update, tier):
            self.update_in_place(array_update, gradient, decided, creates)
            return []
        operands = [self.read_there(a, tier) for a in array_update.operands]
        results = self.work.update(array_update, tier, gradient, operands, decided)
        copies = [(array, tier) for array in array_update.results]
        if tier == Tier.DEVICE:
            return self.write_computed(copies, results)
        for copy, content in zip(copies, results, strict=True):
            self.write(*copy, np.asarray(content))
        return []

    def update_jointly(self, joint: JointUpdate, decided: Pending) -> list[jax.Array]:
        gradients = [self.gradient_block(u, Tier.DEVICE) for u in joint.arrays]
        operands = []
        for array_update in joint.arrays:
            for array in array_update.operands:
                self.read_there(array, Tier.DEVICE)
            operands.append(list(map(self.stores.device.donate, array_update.operands)))
        step_values = decided.step_values
        results = joint.step(decided.factor, step_values, gradients, operands)
        targets = [(a, Tier.DEVICE) for u in joint.arrays for a in u.results]
        return self.write_computed(targets, [x for some in results for x in some])

    def update_in_place(
        self,
        array_update: ArrayUpdate,
        gradient: Any,
        decided: Pending,
        creates: Sequence[Copy],
    ) -> None:
        host, compute = self.stores.host, array_update.compute
        if compute is not None and (compute, Tier.HOST) in creates:
            shape = self.read(array_update.master, Tier.HOST).shape
            content = host.pages.empty(shape, self.work.compute_dtype)
            self.write(compute, Tier.HOST, content)
        update = partial(self.work.update_in_place, array_update, gradient, decided)
        host.update(array_update.results, update)

    def gradient_block(self, array_update: ArrayUpdate, tier: Tier) -> Any:
        if tier == Tier.HOST:
            return self.read(array_update.gradient_block, tier)
        gradient = self.read_there(array_update.gradient, tier)
        if array_update.block is None:
            return gradient
        start, stop = array_update.block
        part = gradient[start:stop]
        return in_device_form(part, self.work.layouts.of(array_update.gradient))
