"""Programs that only run forward, over arrays that rest where training put them.

Such a program has no gradients, residuals or updates. It needs the homes of the arrays,
not the training step that they were chosen for, so several of them share the arrays of
one engine: an evaluation, and any function of the user. Its outputs are arrays of its
plan, which end on the host. It may have caches: arrays of its own at rest, which each
run reads and overwrites, such as the keys and values of attention.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from zinf.core.jaxpr.chosen import on_demand
from zinf.core.plan import (
    NO_EXCHANGE,
    Arrangement,
    Catalog,
    InfeasibleError,
    Plan,
    Shortage,
    build_forward,
    cache,
    show_bytes,
    value,
)
from zinf.core.problem.source import Source
from zinf.core.program import ArrayId, Program, Role, Tier
from zinf.core.segment import (
    NOTHING,
    Function,
    Instead,
    Segment,
    Segmented,
    named_leaves,
    rest_by_row,
    segment_function,
)
from zinf.core.segment.chosen import NO_TABLES, inlined_experts
from zinf.core.sharding import Layouts
from zinf.core.step.arrays import make_catalog
from zinf.core.step.caches import Cached, CacheSizes, Rooms, Tiers
from zinf.core.step.exchange import forward_exchanges
from zinf.core.step.on_demand import LEAST_SLOTS, NO_SLOTS, OnDemand
from zinf.core.step.setup import AtRest, Setup
from zinf.core.step.shrink import Compiled, Limits, shrunk
from zinf.core.step.shrink import compiled as compile_again

NO_CACHES = Cached()


@dataclass(frozen=True)
class Forward:
    """A planned and compiled program that only runs forward.

    Attributes:
        cache_tiers: where each cache rests, by name.
        cache_rooms: what a program beside it, with the same caches, may put where.
    """

    plan: Plan
    segmented: Segmented
    segments: tuple[Segment, ...]
    layouts: Layouts
    num_microbatches: int
    cache_tiers: Tiers = field(default_factory=dict)
    cache_rooms: Rooms = field(default_factory=dict)

    def is_worthwhile(self, num_microbatches: int) -> bool:
        """Whether experts are still worth reading on demand for so many microbatches.

        True if none is.
        """
        chosen = self.segmented.program.chosen
        return all(each.is_worthwhile(num_microbatches) for each in chosen)

    @property
    def room_bytes(self) -> int:
        """Bytes of the device that it never holds."""
        plan = self.plan
        return plan.capacity_bytes[Tier.DEVICE] - plan.peak_bytes[Tier.DEVICE]

    @property
    def compiled(self) -> Compiled:
        """Its executables, for `plan_again` with another number of microbatches."""
        return Compiled(self.segments, self.layouts)


def plan_forward(
    setup: Setup,
    function: Function,
    batch: Any,
    at_rest: AtRest,
    *,
    limits: Limits | None = None,
    num_microbatches: int = 1,
    caches: Cached = NO_CACHES,
    instead: Instead = NOTHING,
    slot_bytes: int | None = None,
) -> Forward:
    """The forward pass of a function, the same on all processes.

    Args:
        batch: shapes and dtypes of one microbatch.
        at_rest: where the persistent arrays rest.
        limits: the first limits on segments; None for those of the config.
        instead: state arrays that are read in place of parameters, from where they
            rest.
        slot_bytes: bytes of the device for experts that are read on demand, if the
            config does not say: at least as many as a microbatch may need, and 0 for
            none. None: all that the pass leaves free.

    Raises:
        ValueError: `memory.experts` holds fewer experts than a layer's tokens choose.
        InfeasibleError: the pass does not fit beside the arrays at rest, on any tier
            for the caches.
    """
    # Each program has constants of its own.
    homes = {a: tier for a, tier in at_rest.homes.items() if a.role != Role.CONST}
    paths = set(setup.problem.params).difference(instead)
    first_bytes = LEAST_SLOTS if slot_bytes is None else slot_bytes
    experts = OnDemand(setup, paths, homes, num_microbatches, first_bytes)
    rest = at_rest.layouts, num_microbatches, caches, instead, experts
    made = _Planned(setup, function, batch, homes, *rest)
    limits = limits or Limits(setup.config.segment_max_bytes)
    with setup.planning():
        forward = made.fitting(limits)
        if slot_bytes is None:
            forward = made.with_room(forward, limits)
    setup.agree_on(forward.plan, f"plan of {function.name}")
    return forward


def plan_again(
    setup: Setup,
    segmented: Segmented,
    compiled: Compiled,
    name: str,
    at_rest: AtRest,
    *,
    num_microbatches: int,
    caches: Cached = NO_CACHES,
) -> Forward:
    """A program of segments that are compiled already.

    Args:
        name: what errors call the function.
        caches: where its caches rest. Those that run are the first microbatches.

    Raises:
        InfeasibleError: the pass does not fit beside the arrays at rest.
    """
    homes = {a: tier for a, tier in at_rest.homes.items() if a.role != Role.CONST}
    function = Function(name, _never)
    experts = OnDemand(setup, frozenset(), homes, num_microbatches, NO_SLOTS)
    rest = at_rest.layouts, num_microbatches, caches, NOTHING, experts
    made = _Planned(setup, function, None, homes, *rest)
    with setup.planning():
        found = made.planned(segmented, compiled)
    setup.agree_on(found.plan, f"plan of {name}")
    return found


def _never(*_: Any) -> Any:
    raise AssertionError("it is traced and compiled already")


def check_rows_of_outputs(forward: Forward, spec: Any, name: str) -> None:
    """Raise unless each output has a row for each row of a microbatch.

    Args:
        spec: shapes and dtypes of one microbatch.
        name: what errors call the function.
    """
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(spec) if leaf.shape}
    program = forward.segmented.program
    found = [program.values[output] for output in program.outputs]
    tree = jax.tree.unflatten(forward.segmented.structure, found)
    for path, output in named_leaves(tree).items():
        if not output.shape or output.shape[0] not in rows:
            raise ValueError(
                f"With num_microbatches = {forward.num_microbatches}, {name} must "
                "return arrays with one row for each row of a microbatch "
                f"({', '.join(map(str, sorted(rows)))}); {path!r} has the shape "
                f"{list(output.shape)}. Leave num_microbatches out."
            )


def forward_of(
    setup: Setup, arranged: Arrangement, segmented: Segmented, compiled: Compiled
) -> Forward:
    """The forward pass of a training step, with the executables of that step.

    Raises:
        InfeasibleError: the pass does not fit beside the arrays at rest.
    """
    training, segments = arranged.plan, compiled.segments
    # In a training step the last segment has only a combined pass.
    last = (segments[-1].evaluation_bytes(), 0)
    workspace = [*arranged.catalog.workspace[:-1], last]
    catalog = replace(arranged.catalog, homes=training.homes, workspace=workspace)
    count = arranged.options.num_microbatches
    with setup.planning():
        plan = build_forward(catalog, training.capacity_bytes, count)
    setup.agree_on(plan, "plan of the evaluation")
    return Forward(plan, segmented, segments, compiled.layouts, count)


@dataclass(frozen=True)
class _Planned:
    setup: Setup
    function: Function
    batch: Any
    homes: Mapping[ArrayId, Tier]
    layouts: Layouts
    num_microbatches: int
    caches: Cached
    instead: Instead
    experts: OnDemand

    def fitting(self, limits: Limits) -> Forward:
        return shrunk(self.setup, self.layouts, self.cut, self.attempt, limits)

    def with_room(self, forward: Forward, limits: Limits) -> Forward:
        """A planned program, with slots for experts in all that it leaves free.

        Its caches stay where they are.
        """
        program, count = forward.segmented.program, self.num_microbatches
        more = self.experts.with_room(program, forward.room_bytes)
        if more is not None:
            caches = replace(self.caches, tiers=forward.cache_tiers)
            with suppress(InfeasibleError):
                forward = replace(self, experts=more, caches=caches).fitting(limits)
        if forward.is_worthwhile(count):
            return forward
        none = replace(self.experts, slot_bytes=NO_SLOTS)
        try:
            return replace(self, experts=none).fitting(limits)
        except InfeasibleError:
            return forward

    def cut(self, max_bytes: int | None) -> Segmented:
        setup = self.setup
        source, tables = self.traced(max_bytes), NO_TABLES
        if setup.rule.mesh.size == 1:
            source = inlined_experts(source)
            source, tables = self.experts.with_slots(source)
        by_row = {array.path for array in self.homes if array.rows}
        return segment_function(
            rest_by_row(source, by_row),
            splittable=setup.splittable(self.layouts),
            max_bytes=max_bytes,
            caches=self.caches.outputs,
            instead=self.instead,
            tables=tables,
        )

    def traced(self, max_bytes: int | None) -> Source:
        function = self.function
        if self.setup.rule.mesh.size == 1:
            function = replace(function, call=on_demand(function.call))
        return function.trace(self.setup.problem, self.batch, max_bytes)

    def attempt(
        self, segmented: Segmented, compiled: Compiled, limits: Limits
    ) -> Forward:
        """The planned program, with fewer slots for experts if it fits only so."""
        try:
            return self.planned(segmented, compiled)
        except InfeasibleError as error:
            experts = self.experts.with_fewer(segmented.program, error)
            if experts is None:
                raise
        fewer = replace(self, experts=experts)
        again = fewer.cut(limits.param_bytes)
        rest = self.setup, again, self.layouts, limits
        return fewer.attempt(again, compile_again(*rest), limits)

    def planned(self, segmented: Segmented, compiled: Compiled) -> Forward:
        segments, layouts = compiled.segments, compiled.layouts
        specs = tuple(s.spec for s in segments)
        program = replace(segmented.program, segments=specs)
        plan, tiers, rooms = self.with_caches(program, compiled)
        segmented, count = replace(segmented, program=program), self.num_microbatches
        return Forward(plan, segmented, segments, layouts, count, tiers, rooms)

    def with_caches(
        self, program: Program, compiled: Compiled
    ) -> tuple[Plan, Tiers, Rooms]:
        """The plan with caches on the fastest tiers for which it fits."""
        capacity, given = self.setup.capacity(), self.caches
        if not program.caches or given.tiers is not None:
            where = given.tiers or {}
            tiers = {name: where[name] for name in program.caches}
            return self.plan(self.catalog(program, compiled, tiers)), tiers, given.rooms
        on_host = dict.fromkeys(program.caches, Tier.HOST)
        sizes = CacheSizes(self.catalog(program, compiled, on_host), self.num_cached)
        rooms = sizes.rooms_left(given.rooms, capacity)
        while True:
            tiers = sizes.placed(rooms)
            try:
                plan = self.plan(self.catalog(program, compiled, tiers))
            except InfeasibleError as error:
                smaller = sizes.smaller(rooms, tiers, error)
                if smaller is None:
                    raise sizes.refusal(rooms, error) from None
                rooms = smaller
            else:
                return plan, tiers, sizes.rooms_beside(rooms, tiers)

    def plan(self, catalog: Catalog) -> Plan:
        capacity = self.setup.capacity()
        self.check_outputs(catalog, capacity)
        return build_forward(catalog, capacity, self.num_microbatches)

    @property
    def num_cached(self) -> int:
        return self.caches.num_microbatches or self.num_microbatches

    def catalog(
        self, program: Program, compiled: Compiled, cache_tiers: Tiers
    ) -> Catalog:
        segments = compiled.segments
        caches = {
            cache(name, m): tier
            for name, tier in cache_tiers.items()
            for m in range(self.num_cached)
        }
        return make_catalog(
            program,
            compiled.layouts,
            self.homes,
            self.homes,
            caches=caches,
            workspace=[(segment.evaluation_bytes(), 0) for segment in segments],
            rates=self.setup.rates(),
            exchange=[(x, NO_EXCHANGE) for x in forward_exchanges(segments)],
        )

    def check_outputs(self, catalog: Catalog, capacity: Mapping[Tier, int]) -> None:
        """Raises if the host has no room for the outputs beside the arrays at rest."""
        output_bytes = sum(
            catalog.nbytes(value(name, m), Tier.HOST)
            for m in range(self.num_microbatches)
            for name in dict.fromkeys(catalog.program.outputs_of(m))
        )
        resting = [a for a, tier in catalog.homes.items() if tier == Tier.HOST]
        needed = output_bytes + sum(catalog.nbytes(a, Tier.HOST) for a in resting)
        if needed <= capacity[Tier.HOST]:
            return
        what = f"what rests there with the outputs of {self.function.name}"
        short = Shortage(capacity[Tier.HOST], needed, what)
        advice = (
            f"The outputs take {show_bytes(output_bytes)} of that: return less, or "
            "give a smaller batch."
        )
        raise InfeasibleError({Tier.HOST: short}, capacity, [advice])
