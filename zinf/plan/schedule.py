"""The order of computation in a step: the vertical schedule.

All microbatches go through a segment before the next segment starts, forward and
backward, so parameters are fetched once a pass and not once a microbatch (GreedySnake,
arXiv:2512.17570, section 3). Gradients accumulate in the order of microbatches within
a segment, and of segments from last to first where several read one parameter: the
order, and so the rounding, depends on nothing else.

A job is an operation with the copies it reads and writes; `stream` puts the transfers
between the jobs.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zinf.plan.catalog import (
    FLOAT32_BYTES,
    Catalog,
    StepOptions,
    UpdateUnit,
    gradient_of,
    norm_of,
    value,
)
from zinf.plan.instruction import (
    TRANSFER_LINKS,
    Accumulate,
    Copy,
    Decide,
    Link,
    Operation,
    Pass,
    Run,
    SumSquares,
    Transfer,
    Update,
)
from zinf.plan.pending import deferred_units, pending_copies, rest_tier
from zinf.program import ArrayId, Program, SegmentSpec, Tier


@dataclass(frozen=True, slots=True)
class Job:
    operation: Operation
    link: Link
    reads: tuple[Copy, ...]
    writes: tuple[Copy, ...]
    workspace: tuple[tuple[Tier, int], ...] = ()
    flops: int = 0
    consumes: tuple[ArrayId, ...] = ()
    """Arrays of which nobody needs the present content afterwards."""


def schedule(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> list[Job]:
    """The jobs of one training step after another, in order."""
    made = _Schedule(catalog, units, options)
    made.forward_passes(with_pending=True)
    made.train()
    return made.jobs


def schedule_first(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> list[Job]:
    """The jobs of a step before which nothing is pending."""
    made = _Schedule(catalog, units, options)
    made.forward_passes()
    made.train()
    return made.jobs


def schedule_flush(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> list[Job]:
    """The jobs that do what is pending, and nothing else."""
    made = _Schedule(catalog, units, options)
    for k in range(len(catalog.program.segments)):
        made.update_pending(k)
    return made.jobs


def schedule_evaluation(catalog: Catalog, options: StepOptions) -> list[Job]:
    """The jobs of a forward pass alone; losses and outputs end on the host."""
    made = _Schedule(catalog, (), options)
    made.forward_passes()
    for m in made.microbatches:
        made.forward(made.last, m, results_to=Tier.HOST)
    return made.jobs


class _Schedule:
    def __init__(
        self,
        catalog: Catalog,
        units: Sequence[UpdateUnit],
        options: StepOptions,
    ):
        self.catalog, self.options = catalog, options
        self.program = catalog.program
        self.microbatches = range(options.num_microbatches)
        *self.body, self.last = range(len(self.program.segments))
        self.jobs: list[Job] = []
        self.contributed: Counter = Counter()
        self.begun: set[ArrayId] = set()
        self.norms: list[ArrayId] = []
        self.keeps = catalog.kept_segments(options.num_kept)
        deferred = deferred_units(units, options.deferred_share)
        self.units = [(i, u) for i, u in enumerate(units) if i not in deferred]
        self.at_rest = dict(pending_copies(units, deferred, catalog, options))
        self.pending: dict[int, list[tuple[int, UpdateUnit]]] = defaultdict(list)
        first_reader = first_readers(self.program)
        for number in sorted(deferred):
            position = min(first_reader[u.gradient] for u in units[number].arrays)
            self.pending[position].append((number, units[number]))
        self.pending_reads = Counter(g for i in deferred for g in _gradients(units[i]))

    def forward_passes(self, *, with_pending: bool = False) -> None:
        """All segments but the last; with `with_pending`, what is due before each."""
        for k in self.body:
            if with_pending:
                self.update_pending(k)
            for m in self.microbatches:
                self.forward(k, m)
        if with_pending:
            self.update_pending(self.last)

    def train(self) -> None:
        """The last segment, the backward pass, and the updates of this step."""
        body, last = self.body, self.last
        losses = [self.loss(last, m) for m in self.microbatches]
        self.finish_gradients(last)
        if self.options.updates_in_backward and self.units:
            self.host_job(Decide(tuple(losses), ()), losses)
            self.update_ready()
        for k in reversed(body):
            if self.program.segments[k].has_backward:
                for m in self.microbatches:
                    self.backward(k, m)
                self.finish_gradients(k)
                if self.options.updates_in_backward:
                    self.update_ready()
        self.host_job(Decide(tuple(losses), tuple(self.norms)), [*losses, *self.norms])
        if not self.options.updates_in_backward:
            self.update_ready()
        assert not self.units, f"no gradient for {self.units[0][1].name}"

    def add(self, operation: Operation, link: Link, **rest: Any) -> None:
        self.jobs.append(Job(operation, link, **rest))

    def host_job(self, operation: Operation, reads: Sequence[ArrayId]) -> None:
        copies = tuple((a, Tier.HOST) for a in reads)
        self.add(operation, Link.HOST, reads=copies, writes=())

    def transfer(self, arrays: Sequence[ArrayId], source: Tier, target: Tier) -> None:
        """Moves arrays down (or up) tier by tier, one job a hop."""
        hops = {
            (Tier.DEVICE, Tier.NVME): (Tier.DEVICE, Tier.HOST, Tier.NVME),
            (Tier.NVME, Tier.DEVICE): (Tier.NVME, Tier.HOST, Tier.DEVICE),
        }.get((source, target), (source, target))
        for start, stop in zip(hops, hops[1:], strict=False):
            self.add(
                Transfer(tuple(arrays), start, stop),
                TRANSFER_LINKS[start, stop],
                reads=tuple((a, start) for a in arrays),
                writes=tuple((a, stop) for a in arrays),
            )

    def inputs(self, segment: SegmentSpec, m: int) -> tuple[Copy, ...]:
        consts = set(self.program.consts)
        values = [
            ArrayId("const", n) if n in consts else value(n, m) for n in segment.inputs
        ]
        return tuple((a, Tier.DEVICE) for a in (*segment.params, *values))

    def forward(self, k: int, m: int, results_to: Tier | None = None) -> None:
        segment = self.program.segments[k]
        outputs = [value(n, m) for n in segment.outputs]
        kind, workspace, kept = Pass.FORWARD, self.catalog.workspace[k][0], ()
        if k in self.keeps:
            kind, workspace = Pass.KEEPING, self.catalog.keeping[k].workspace[0]
            kept = self.catalog.residuals(k, m)
        self.add(
            Run(k, segment.name, kind, m, residuals=kept),
            Link.DEVICE,
            reads=self.inputs(segment, m),
            writes=tuple((a, Tier.DEVICE) for a in (*outputs, *kept)),
            workspace=((Tier.DEVICE, workspace),),
            flops=segment.flops,
        )
        target = results_to or self.options.value_tier
        if target != Tier.DEVICE and outputs:
            self.transfer(outputs, Tier.DEVICE, target)

    def loss(self, k: int, m: int) -> ArrayId:
        """Runs the last segment both ways; returns the loss, which is on the host."""
        segment = self.program.segments[k]
        results = [value(n, m) for n in segment.outputs]
        self.run_backward(k, m, Pass.LOSS, (), results)
        self.transfer(results, Tier.DEVICE, Tier.HOST)
        return results[0]

    def backward(self, k: int, m: int) -> None:
        outputs = self.program.segments[k].active_outputs
        cotangents = [ArrayId("cotangent", n, None, m) for n in outputs]
        kind = Pass.KEPT if k in self.keeps else Pass.BACKWARD
        self.run_backward(k, m, kind, cotangents, ())

    def run_backward(
        self,
        k: int,
        m: int,
        kind: Pass,
        cotangents: Sequence[ArrayId],
        results: Sequence[ArrayId],
    ) -> None:
        segment = self.program.segments[k]
        gradients = [
            self.landing(gradient_of(a), is_gradient=True)
            for a in segment.trained_params
        ]
        inward = [
            self.landing(ArrayId("cotangent", n, None, m), is_gradient=False)
            for n in segment.active_inputs
        ]
        workspace, kept, passes = self.catalog.workspace[k][1], (), 3
        if kind == Pass.KEPT:
            workspace = self.catalog.keeping[k].workspace[1]
            kept, passes = self.catalog.residuals(k, m), 2
        written = (*results, *gradients, *inward)
        self.add(
            Run(k, segment.name, kind, m, tuple(gradients), tuple(inward), kept),
            Link.DEVICE,
            reads=(
                *self.inputs(segment, m),
                *((a, Tier.DEVICE) for a in (*cotangents, *kept)),
            ),
            writes=tuple((a, Tier.DEVICE) for a in written),
            workspace=((Tier.DEVICE, workspace),),
            flops=passes * segment.flops,
        )
        parts = [a for a in (*gradients, *inward) if a.role.endswith("part")]
        if parts:
            self.accumulate(parts)

    def landing(self, target: ArrayId, *, is_gradient: bool) -> ArrayId:
        """Where a contribution lands: on its accumulator if it is the first, or beside.

        A narrow gradient that accumulates always lands beside: its accumulator is wide.
        """
        part = ArrayId(f"{target.role} part", *_rest(target))
        if is_gradient:
            spec = self.catalog.param_spec(target)
            total = self.catalog.num_contributions[target.path, target.rows]
            if total > 1 and spec.itemsize < FLOAT32_BYTES:
                return part
        if target in self.begun:
            return part
        self.begun.add(target)
        return target

    def accumulate(self, parts: Sequence[ArrayId]) -> None:
        targets = [ArrayId(a.role.removesuffix(" part"), *_rest(a)) for a in parts]
        existing = [a for a in targets if a in self.begun]
        self.begun.update(targets)
        self.add(
            Accumulate(tuple(targets), tuple(parts)),
            Link.DEVICE,
            reads=tuple((a, Tier.DEVICE) for a in (*parts, *existing)),
            writes=tuple((a, Tier.DEVICE) for a in targets),
        )

    def finish_gradients(self, k: int) -> None:
        """Measures and offloads the gradients that are complete after segment `k`."""
        segment = self.program.segments[k]
        done = []
        for array in segment.trained_params:
            counted = (array.path, array.rows)
            self.contributed[counted] += self.options.num_microbatches
            if self.contributed[counted] == self.catalog.num_contributions[counted]:
                done.append(gradient_of(array))
        if not done:
            return
        norm = norm_of(segment.name)
        self.norms.append(norm)
        self.add(
            SumSquares(tuple(done), norm),
            Link.DEVICE,
            reads=tuple((a, Tier.DEVICE) for a in done),
            writes=((norm, Tier.DEVICE),),
        )
        tiers = self.gradient_tiers()
        moved = [a for a in done if tiers.get(a, Tier.DEVICE) != Tier.DEVICE]
        self.transfer([norm, *moved], Tier.DEVICE, Tier.HOST)
        further = [a for a in moved if tiers[a] == Tier.NVME]
        if further:
            self.transfer(further, Tier.HOST, Tier.NVME)

    def gradient_tiers(self) -> dict[ArrayId, Tier]:
        """Where complete gradients go."""
        tiers = {}
        for _, unit in self.units:
            tier = unit.tier
            if not self.options.updates_in_backward:
                tier = rest_tier(unit, self.catalog, self.options)
            tiers.update(dict.fromkeys(_gradients(unit), tier))
        return tiers | self.at_rest

    def update_ready(self) -> None:
        """Updates the units whose gradients are complete, in order."""
        waiting = []
        for number, unit in self.units:
            if all(self.is_complete(update.gradient) for update in unit.arrays):
                self.update(number, unit)
            else:
                waiting.append((number, unit))
        self.units = waiting

    def is_complete(self, gradient: ArrayId) -> bool:
        counted = (gradient.path, gradient.rows)
        return self.contributed[counted] == self.catalog.num_contributions[counted]

    def update_pending(self, k: int) -> None:
        """Does the pending updates of what segment `k` is the first to read."""
        for number, unit in self.pending[k]:
            self.update(number, unit, is_pending=True)

    def update(
        self, number: int, unit: UpdateUnit, *, is_pending: bool = False
    ) -> None:
        tier = unit.tier
        gradients = _gradients(unit)
        operands = [a for update in unit.arrays for a in update.operands]
        results = [a for update in unit.arrays for a in update.results]
        consumed = []
        if is_pending:
            operands = _with_whole_params(unit, self.catalog)
            self.pending_reads.subtract(gradients)
            consumed = [g for g in gradients if not self.pending_reads[g]]
        self.add(
            Update(number, unit.name, tier, is_pending),
            Link.HOST if tier == Tier.HOST else Link.DEVICE,
            reads=tuple((a, tier) for a in (*gradients, *operands)),
            writes=tuple((a, tier) for a in results),
            workspace=((tier, unit.workspace_bytes),),
            consumes=tuple(consumed),
        )
        away: dict[Tier, list[ArrayId]] = {}
        for array in results:
            home = self.catalog.home_tier(array)
            assert home is not None
            if home != tier:
                away.setdefault(home, []).append(array)
        for home, arrays in away.items():
            self.transfer(arrays, tier, home)


def first_readers(program: Program) -> dict[ArrayId, int]:
    """By gradient, the first segment that reads the parameter array that it is of."""
    found: dict[ArrayId, int] = {}
    for k, segment in enumerate(program.segments):
        for array in segment.params:
            found.setdefault(gradient_of(array), k)
    return found


def _with_whole_params(unit: UpdateUnit, catalog: Catalog) -> list[ArrayId]:
    """The operands of a unit, with whole parameters in place of blocks of them.

    The forward pass is the next to read the parameter, and as a whole. So blocks are
    updated inside of it: made on their own, they would be fetched again from home,
    unless that is the device.
    """
    operands: list[ArrayId] = []
    for update in unit.arrays:
        param = update.compute or update.master
        if update.rows is None or catalog.home_tier(param) == Tier.DEVICE:
            operands += update.operands
            continue
        operands += [a for a in update.operands if a != param]
        operands.append(param.whole)
    return list(dict.fromkeys(operands))


def _gradients(unit: UpdateUnit) -> list[ArrayId]:
    return list(dict.fromkeys(update.gradient for update in unit.arrays))


def _rest(array: ArrayId) -> tuple:
    return array.path, array.rows, array.microbatch
