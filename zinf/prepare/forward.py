"""Programs that only run forward, over arrays that rest where training put them.

Such a program has no gradients, residuals or updates. It needs the homes of the arrays,
not the training step that they were chosen for, so several of them share the arrays of
one engine: an evaluation, and any function of the user. Its outputs are arrays of its
plan, which end on the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from zinf.plan import (
    NO_EXCHANGE,
    Catalog,
    InfeasibleError,
    Plan,
    Shortage,
    build_forward,
    show_bytes,
    value,
)
from zinf.prepare.exchange import forward_exchanges
from zinf.prepare.planner import AtRest, Compiled, Planner, Streamed
from zinf.prepare.shrink import Limits
from zinf.program import ArrayId, Program, Role, Tier
from zinf.segment import (
    Function,
    Segment,
    Segmented,
    named_leaves,
    rest_by_row,
    segment_function,
)
from zinf.sharding import Layouts


@dataclass(frozen=True)
class Forward:
    """A planned and compiled program that only runs forward."""

    plan: Plan
    segmented: Segmented
    segments: tuple[Segment, ...]
    layouts: Layouts
    num_microbatches: int


def plan_forward(
    planner: Planner,
    function: Function,
    batch: Any,
    at_rest: AtRest,
    *,
    limits: Limits | None = None,
    num_microbatches: int = 1,
) -> Forward:
    """The forward pass of a function, the same on all processes.

    Args:
        batch: shapes and dtypes of one microbatch.
        at_rest: where the persistent arrays rest.
        limits: the first limits on segments; None for those of the config.

    Raises:
        InfeasibleError: the pass does not fit beside the arrays at rest.
    """
    # Each program has constants of its own.
    homes = {a: tier for a, tier in at_rest.homes.items() if a.role != Role.CONST}
    rest = homes, at_rest.layouts, num_microbatches
    made = _Planned(planner, function, batch, *rest)
    with planner.planning():
        forward = made.fitting(limits or Limits(planner.config.segment_max_bytes))
    planner.agree_on(forward.plan, f"plan of {function.name}")
    return forward


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


def forward_of(planner: Planner, training: Streamed) -> Forward:
    """The forward pass of a training step, with the executables of that step.

    Raises:
        InfeasibleError: the pass does not fit beside the arrays at rest.
    """
    catalog, segments = training.arranged.catalog, training.segments
    # In a training step the last segment has only a combined pass.
    last = (segments[-1].evaluation_bytes(), 0)
    workspace = [*catalog.workspace[:-1], last]
    catalog = replace(catalog, homes=training.plan.homes, workspace=workspace)
    num_microbatches = training.arranged.options.num_microbatches
    with planner.planning():
        plan = build_forward(catalog, training.plan.capacity_bytes, num_microbatches)
    planner.agree_on(plan, "plan of the evaluation")
    return Forward(
        plan, training.segmented, segments, training.layouts, num_microbatches
    )


@dataclass(frozen=True)
class _Planned:
    planner: Planner
    function: Function
    batch: Any
    homes: Mapping[ArrayId, Tier]
    layouts: Layouts
    num_microbatches: int

    def fitting(self, limits: Limits) -> Forward:
        return self.planner.shrunk(self.layouts, self.cut, self.attempt, limits)

    def cut(self, max_bytes: int | None) -> Segmented:
        planner = self.planner
        source = self.function.trace(planner.problem, self.batch, max_bytes)
        by_row = {array.path for array in self.homes if array.rows}
        return segment_function(
            rest_by_row(source, by_row),
            splittable=planner.splittable(self.layouts),
            max_bytes=max_bytes,
        )

    def attempt(
        self, segmented: Segmented, compiled: Compiled, limits: Limits
    ) -> Forward:
        segments, layouts = compiled.segments, compiled.layouts
        specs = tuple(s.spec for s in segments)
        program = replace(segmented.program, segments=specs)
        catalog = self.catalog(program, compiled)
        capacity = self.planner.capacity()
        self.check_outputs(catalog, capacity)
        plan = build_forward(catalog, capacity, self.num_microbatches)
        segmented = replace(segmented, program=program)
        return Forward(plan, segmented, segments, layouts, self.num_microbatches)

    def catalog(self, program: Program, compiled: Compiled) -> Catalog:
        segments, layouts = compiled.segments, compiled.layouts
        consts = [ArrayId(Role.CONST, name) for name in program.consts]
        wholes = self.planner.array_specs()
        specs = {
            a: wholes[a.whole].rows(*a.rows) if a.rows else wholes[a]
            for a in self.homes
        }
        specs |= {array: program.values[array.path] for array in consts}
        return Catalog(
            layouts.share_of(program),
            {array: layouts.share_spec(array, spec) for array, spec in specs.items()},
            {**self.homes, **dict.fromkeys(consts, Tier.DEVICE)},
            [(segment.evaluation_bytes(), 0) for segment in segments],
            rates=self.planner.rates(),
            device_parts=layouts.device_parts(),
            exchange=[(x, NO_EXCHANGE) for x in forward_exchanges(segments)],
        )

    def check_outputs(self, catalog: Catalog, capacity: Mapping[Tier, int]) -> None:
        """Raises if the host has no room for the outputs beside the arrays at rest."""
        names = dict.fromkeys(catalog.program.outputs)
        once = sum(catalog.nbytes(value(name, 0), Tier.HOST) for name in names)
        output_bytes = self.num_microbatches * once
        resting = [a for a, tier in self.homes.items() if tier == Tier.HOST]
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
