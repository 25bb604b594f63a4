"""The order of computation in a step: the vertical schedule.

All microbatches go through a segment before the next segment starts, forward and
backward, so parameters are fetched once a pass and not once a microbatch (GreedySnake,
arXiv:2512.17570, section 3). Gradients accumulate in the order of microbatches within
a segment, and of segments from last to first where several read one parameter. Order
and rounding depend on nothing else.

`updates` inserts the updates; `stream` adds the transfers between the jobs.
"""

from collections import Counter
from collections.abc import Sequence

from zinf.core.plan.catalog import (
    Catalog,
    StepOptions,
    UpdateUnit,
    cache,
    gradient_of,
    value,
)
from zinf.core.plan.instruction import (
    NO_EXCHANGE,
    Accumulate,
    Copy,
    Decide,
    FetchChosen,
    Pass,
    RowSumIds,
    Run,
    SumParts,
)
from zinf.core.plan.job import Job, JobList
from zinf.core.plan.norms import add_norms
from zinf.core.plan.updates import Updates
from zinf.core.program import (
    FLOAT32_BYTES,
    ArrayId,
    Chosen,
    Link,
    Role,
    SegmentSpec,
    Tier,
)

# Experts that are read together: a drive is fastest with several requests.
EXPERTS_AT_ONCE = 8
# Workspace of adding rows to a gradient, in bytes of the rows in float32: rows are
# first summed by row number, and the sums are cast. XLA:CPU sums bfloat16 in float32.
ROW_SUM_COPIES = 3


def schedule(
    catalog: Catalog,
    units: Sequence[UpdateUnit],
    options: StepOptions,
    *,
    is_first: bool = False,
) -> list[Job]:
    """The jobs of a training step, in order.

    Args:
        is_first: no update is pending before the step.
    """
    made = _Schedule(catalog, units, options)
    made.forward_passes(with_pending=not is_first)
    made.train()
    return made.jobs


def schedule_flush(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> list[Job]:
    """The jobs that run the pending updates, and nothing else."""
    made = _Schedule(catalog, units, options)
    for k in range(len(catalog.program.segments)):
        made.updates.add_pending(k)
    return made.jobs


def schedule_forward(catalog: Catalog, options: StepOptions) -> list[Job]:
    """The jobs of a forward pass alone; all outputs of the program end on the host."""
    made = _Schedule(catalog, (), options)
    made.forward_passes()
    made.forward_all(made.last)
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
        self.jobs = JobList()
        self.updates = Updates(self.jobs, catalog, units, options)
        self.contributed: Counter = Counter()
        self.begun: set[ArrayId] = set()
        self.norms: list[ArrayId] = []
        self.keeps = catalog.kept_segments(options.num_kept)
        self.returned = frozenset(self.program.outputs)
        self.tiled = {tiling.path for tiling in self.program.tilings}

    def forward_passes(self, *, with_pending: bool = False) -> None:
        """Runs all segments but the last; `with_pending`, also the pending updates."""
        for k in self.body:
            if with_pending:
                self.updates.add_pending(k)
            self.forward_all(k)
        if with_pending:
            self.updates.add_pending(self.last)

    def train(self) -> None:
        """The last segment, the backward pass, and the updates of this step."""
        body, last = self.body, self.last
        losses = [self.loss(last, m) for m in self.microbatches]
        self.finish_gradients(last)
        if self.options.updates_in_backward and self.updates.units:
            self.jobs.add_host(Decide(tuple(losses), ()), losses)
            self.updates.add_ready(self.is_complete)
        for k in reversed(body):
            if self.program.segments[k].has_backward:
                for m in self.microbatches:
                    self.backward(k, m)
                self.finish_gradients(k)
                if self.options.updates_in_backward:
                    self.updates.add_ready(self.is_complete)
        decide = Decide(tuple(losses), tuple(self.norms))
        self.jobs.add_host(decide, [*losses, *self.norms])
        if not self.options.updates_in_backward:
            self.updates.add_ready(self.is_complete)
        waiting = [unit.name for _, unit in self.updates.units]
        assert not waiting, f"no gradient for {waiting[0]}"

    def inputs(
        self, segment: SegmentSpec, params: Sequence[ArrayId], m: int
    ) -> tuple[Copy, ...]:
        consts, caches = set(self.program.consts), set(self.program.caches)

        def named(name: str) -> ArrayId:
            if name in consts:
                return ArrayId(Role.CONST, name)
            return cache(name, m) if name in caches else value(name, m)

        values = map(named, segment.inputs)
        return tuple((a, Tier.DEVICE) for a in (*params, *values))

    def forward_all(self, k: int) -> None:
        """Runs a segment for each microbatch that passes through it."""
        for m in filter(self.program.segments[k].runs, self.microbatches):
            self.forward(k, m)

    def forward(self, k: int, m: int) -> None:
        segment = self.program.segments[k]
        self.fetch_experts(k, m)
        outputs = [value(n, m) for n in segment.outputs]
        caches = [cache(n, m) for n in segment.caches]
        changed = tuple((a, Tier.DEVICE) for a in caches)
        kind, workspace, kept = Pass.FORWARD, self.catalog.workspace[k][0], ()
        if k in self.keeps:
            kind, workspace = Pass.KEEPING, self.catalog.keeping[k].workspace[0]
            kept = self.catalog.residuals(k, m)
        self.jobs.add(
            Run(k, segment.name, kind, m),
            Link.DEVICE,
            reads=(*self.inputs(segment, segment.params, m), *changed),
            writes=(*((a, Tier.DEVICE) for a in (*outputs, *kept)), *changed),
            workspace=((Tier.DEVICE, workspace),),
            flops=segment.flops,
            exchange=self.catalog.exchange_of(k)[0],
        )
        self.bring_home(caches)
        returned = [a for a in outputs if a.path in self.returned]
        if returned:
            self.jobs.transfer(returned, Tier.DEVICE, Tier.HOST)
        others = [a for a in outputs if a.path not in self.returned]
        if self.options.value_tier != Tier.DEVICE and others:
            self.jobs.transfer(others, Tier.DEVICE, self.options.value_tier)

    def fetch_experts(self, k: int, m: int) -> None:
        """Brings the experts that tokens chose to slots, before a pass of a segment.

        Other layers may have taken the slots since the forward pass.
        """
        for number, chosen in enumerate(self.program.chosen):
            if chosen.segment == k:
                self.fetch_chosen(number, chosen, m)

    def fetch_chosen(self, number: int, chosen: Chosen, m: int) -> None:
        catalog = self.catalog
        homes = {a: catalog.home_tiers[a] for a in chosen.arrays}
        farthest = max((t for t in homes.values() if t), key=lambda tier: tier.order)
        hop = farthest.row.hop
        assert hop is not None
        expert_bytes = sum(
            catalog.nbytes(a, Tier.HOST) // chosen.num_experts for a in homes
        )
        at_once = min(chosen.most, EXPERTS_AT_ONCE)
        expected_bytes = round(chosen.expected_reads(m) * expert_bytes)
        name = self.program.segments[chosen.segment].name
        self.jobs.add(
            FetchChosen(number, name, m, expected_bytes, at_once),
            hop.fetch,
            reads=(
                (value(chosen.choice, m), Tier.HOST),
                *((a, tier) for a, tier in homes.items() if tier),
            ),
            writes=(
                (value(chosen.table, m), Tier.DEVICE),
                *((ArrayId(Role.CONST, n), Tier.DEVICE) for n in chosen.slots),
            ),
            workspace=(
                (Tier.DEVICE, expert_bytes),
                (Tier.HOST, at_once * expert_bytes),
            ),
        )

    def bring_home(self, arrays: Sequence[ArrayId]) -> None:
        """Moves arrays that a run overwrote on the device to where they rest."""
        for tier in Tier.DEVICE.slower:
            there = [a for a in arrays if self.catalog.home_tier(a) == tier]
            if there:
                self.jobs.transfer(there, Tier.DEVICE, tier)

    def loss(self, k: int, m: int) -> ArrayId:
        """Runs both passes of the last segment; returns the loss, moved to the host."""
        segment = self.program.segments[k]
        results = [value(n, m) for n in segment.outputs]
        self.run_backward(k, m, Pass.LOSS, (), results)
        self.jobs.transfer(results, Tier.DEVICE, Tier.HOST)
        return results[0]

    def backward(self, k: int, m: int) -> None:
        outputs = self.program.segments[k].active_outputs
        cotangents = [ArrayId(Role.COTANGENT, n, None, m) for n in outputs]
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
        self.fetch_experts(k, m)
        sums = {
            x.array: self.catalog.row_sum(k, i, m)
            for i, x in enumerate(segment.row_sums)
        }
        in_parts = set(segment.in_parts)

        def written_for(array: ArrayId) -> ArrayId:
            if array in sums:
                return sums[array][0]
            role = Role.PARTS if array in in_parts else Role.GRADIENT
            return self.landing(array.of_role(role), is_gradient=True)

        gradients = list(map(written_for, segment.trained_params))
        gradients += [numbers for _, numbers in sums.values()]
        inward = [
            self.landing(ArrayId(Role.COTANGENT, n, None, m), is_gradient=False)
            for n in segment.active_inputs
        ]
        params = segment.params if kind == Pass.LOSS else segment.read_backward
        workspace, kept = self.catalog.workspace[k][1], ()
        flops = 3 * segment.flops
        if kind == Pass.KEPT:
            keeping = self.catalog.keeping[k]
            workspace, kept = keeping.workspace[1], self.catalog.residuals(k, m)
            flops = 2 * segment.flops + keeping.flops_again
        written = (*results, *gradients, *inward)
        self.jobs.add(
            Run(k, segment.name, kind, m),
            Link.DEVICE,
            reads=(
                *self.inputs(segment, params, m),
                *((a, Tier.DEVICE) for a in (*cotangents, *kept)),
            ),
            writes=tuple((a, Tier.DEVICE) for a in written),
            workspace=((Tier.DEVICE, workspace),),
            flops=flops,
            exchange=self.catalog.exchange_of(k)[1],
        )
        totals = {a: a.role.total for a in (*gradients, *inward)}
        parts = [a for a, total in totals.items() if total]
        targets = [a.of_role(total) for a, total in totals.items() if total]
        targets += map(gradient_of, sums)
        if targets:
            rows = list(sums.values())
            self.accumulate(targets, [*parts, *(a for a, _ in rows)], rows)

    def landing(self, target: ArrayId, *, is_gradient: bool) -> ArrayId:
        """The array that a pass writes: the accumulator at first, then a part.

        A part is added to the accumulator afterwards. If a gradient is narrower than
        float32 and has several contributions, each is a part: its accumulator is
        float32.
        """
        part = target.of_role(target.role.part)
        if is_gradient:
            spec = self.catalog.param_spec(target)
            total = self.catalog.num_contributions[target.path, target.rows]
            if total > 1 and spec.itemsize < FLOAT32_BYTES:
                return part
        if target in self.begun:
            return part
        self.begun.add(target)
        return target

    def accumulate(
        self,
        targets: Sequence[ArrayId],
        sources: Sequence[ArrayId],
        rows: Sequence[RowSumIds],
    ) -> None:
        existing = [a for a in targets if a in self.begun]
        self.begun.update(targets)
        numbers = [a for _, a in rows]
        row_bytes = sum(map(self.catalog.wide_row_bytes, (a for a, _ in rows)))
        self.jobs.add(
            Accumulate(tuple(targets), tuple(sources), tuple(rows)),
            Link.DEVICE,
            reads=tuple((a, Tier.DEVICE) for a in (*sources, *numbers, *existing)),
            writes=tuple((a, Tier.DEVICE) for a in targets),
            workspace=((Tier.DEVICE, ROW_SUM_COPIES * row_bytes),) if rows else (),
        )

    def sum_parts(self, k: int) -> None:
        """Exchanges the gradients that segment `k` has as parts of all microbatches."""
        segment = self.program.segments[k]
        if not segment.in_parts:
            return
        parts = tuple(a.of_role(Role.PARTS) for a in segment.in_parts)
        self.begun.difference_update(parts)
        targets = []
        for array in map(gradient_of, segment.in_parts):
            is_first = array not in self.begun
            targets.append(array if is_first else array.of_role(array.role.part))
            self.begun.add(array)
        sums = [self.catalog.part_sums[gradient_of(a)] for a in segment.in_parts]
        errors = tuple(one.errors for one in sums)
        all_errors = [a for some in errors for a in some]
        self.jobs.add(
            SumParts(parts, tuple(targets), errors),
            Link.DEVICE,
            reads=tuple((a, Tier.DEVICE) for a in (*parts, *all_errors)),
            writes=tuple((a, Tier.DEVICE) for a in (*targets, *all_errors)),
            workspace=((Tier.DEVICE, max(x.workspace_bytes for x in sums)),),
            exchange=sum((x.exchange for x in sums), NO_EXCHANGE),
        )
        self.bring_home(all_errors)
        later = [a for a in targets if a.role.total]
        if later:
            self.accumulate([gradient_of(a) for a in later], later, ())

    def finish_gradients(self, k: int) -> None:
        """Offloads the gradients that segment `k` completes, and their norm.

        A tile may be read by an earlier segment too: a table of embeddings that is also
        the head. Its gradient so far is offloaded as well, or those of all tiles, which
        are as large as the whole, would be on the device until the first segment.
        """
        self.sum_parts(k)
        segment = self.program.segments[k]
        done, begun = [], []
        for array in segment.trained_params:
            counted = (array.path, array.rows)
            self.contributed[counted] += self.options.num_microbatches
            if self.is_complete(gradient_of(array)):
                done.append(gradient_of(array))
            elif (
                array.path in self.tiled
                and self.catalog.home_tier(array) != Tier.DEVICE
            ):
                begun.append(gradient_of(array))
        if begun:
            self.jobs.transfer(begun, Tier.DEVICE, self.options.gradient_tier)
        if not done:
            return
        norms = add_norms(self.jobs, self.catalog, segment.name, done)
        self.norms += norms
        tiers = self.updates.gradient_tiers
        moved = [a for a in done if tiers.get(a, Tier.DEVICE) != Tier.DEVICE]
        self.jobs.transfer([*norms, *moved], Tier.DEVICE, Tier.HOST)
        for tier in Tier.HOST.slower:
            further = [a for a in moved if tiers[a] == tier]
            if further:
                self.jobs.transfer(further, Tier.HOST, tier)

    def is_complete(self, gradient: ArrayId) -> bool:
        counted = (gradient.path, gradient.rows)
        return self.contributed[counted] == self.catalog.num_contributions[counted]
