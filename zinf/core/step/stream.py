"""Plans the streamed step: segment by segment, with arrays on any tiers."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import jax.numpy as jnp

from zinf.core.plan import (
    Choices,
    FetchChosen,
    InfeasibleError,
    Plan,
    Resident,
    StepOptions,
    build_at_home,
    count_contributions,
    prove,
    show_bytes,
)
from zinf.core.problem.source import Source
from zinf.core.program import ArrayId, Role, Tier, expected_experts, open_tiers
from zinf.core.segment import Segmented
from zinf.core.step.arrays import make_catalog, residents, resting_pieces
from zinf.core.step.earlier_plan import EarlierPlan, Step, earlier_plan
from zinf.core.step.exchange import segment_exchanges
from zinf.core.step.joint import grouped
from zinf.core.step.keeping import keeping_as_chosen, what_may_be_kept
from zinf.core.step.on_demand import LEAST_SLOTS, OnDemand, frozen_experts_apart
from zinf.core.step.part_sums import compile_part_sums
from zinf.core.step.run.streamed import Streamed
from zinf.core.step.setup import Setup, StepRequest
from zinf.core.step.shrink import (
    Compiled,
    Limits,
    accumulates,
    compiled,
    cut,
    shrunk,
)
from zinf.core.step.step_weight import StepWeight
from zinf.core.step.updates import compile_program_updates


def stream(setup: Setup, request: StepRequest) -> Streamed:
    """Cut by layer; while the plan does not fit the device, tighten the limits.

    Tighter limits make segments smaller. Weights larger than a segment may hold are
    read by tile, and segments with too large intermediate values run in blocks of rows.
    """
    limits, layouts = Limits(setup.config.segment_max_bytes), request.layouts

    def cut_to(max_bytes: int | None) -> Segmented:
        return cut(setup, _traced(setup, request, max_bytes), layouts, max_bytes)

    def attempt(segmented: Segmented, compiled: Compiled, limits: Limits) -> Streamed:
        rest = request.homes, request.weight
        return stream_segments(setup, segmented, compiled, limits, *rest)

    whole = shrunk(setup, layouts, cut_to, attempt, limits)
    return _on_demand(setup, request, whole)


def _traced(setup: Setup, request: StepRequest, max_bytes: int | None) -> Source:
    """The loss for segments of at most so many bytes of parameters."""
    is_traced = max_bytes == setup.config.segment_max_bytes
    source = request.source if is_traced else setup.trace(request.batch, max_bytes)
    return frozen_experts_apart(setup, source) if setup.may_read_on_demand else source


def _on_demand(setup: Setup, request: StepRequest, whole: Streamed) -> Streamed:
    """The step that reads the frozen experts that its tokens choose, if it is faster.

    Args:
        whole: the step that reads all experts of a layer.
    """
    limits = whole.limits
    source = _traced(setup, request, limits.param_bytes)
    homes = {a: t for a, t in whole.plan.homes.items() if a.role != Role.CONST}
    left = setup.capacity()[Tier.DEVICE] - whole.plan.home_bytes[Tier.DEVICE]
    # The other half is for what streams through the device meanwhile.
    rest = homes, setup.config.num_microbatches, max(LEAST_SLOTS, left // 2)
    experts = OnDemand(setup, setup.frozen, *rest)
    if not experts.with_slots(source)[1]:
        layers = source.whole_experts or experts.layers_in(source)
        return replace(whole, experts=_why_all(layers[0])) if layers else whole
    try:
        chosen = _with_slots(setup, request, source, experts, limits)
    except InfeasibleError:
        if not experts.is_automatic:
            raise
        return replace(whole, experts=NO_ROOM)
    seconds, others = (x.plan.timeline.seconds for x in (chosen, whole))
    times = f"{seconds:.3g} s a step are predicted, and {others:.3g} s with all experts"
    if seconds < others or not experts.is_automatic:
        return replace(chosen, experts=f"{_expected(chosen.plan)} {times}.")
    why = f"{READS_ALL}. With those alone that are chosen, {times}."
    return replace(whole, experts=why)


def _with_slots(
    setup: Setup,
    request: StepRequest,
    source: Source,
    experts: OnDemand,
    limits: Limits,
) -> Streamed:
    """The step with experts in slots, of which it gets fewer if it fits only so."""
    rest = request.layouts, limits
    in_slots, tables = experts.with_slots(source)
    segmented = cut(setup, in_slots, request.layouts, limits.param_bytes, tables)
    made = compiled(setup, segmented, *rest)
    try:
        at_home = limits, experts.homes, request.weight
        return stream_segments(setup, segmented, made, *at_home)
    except InfeasibleError as error:
        fewer = experts.with_fewer(segmented.program, error)
        if fewer is None:
            raise
    return _with_slots(setup, request, source, fewer, limits)


READS_ALL = "Each pass reads all experts of a layer"
NO_ROOM = f"{READS_ALL}: there is no room for slots of those that are chosen."


def _why_all(layer: tuple[int, int, int]) -> str:
    """Why a layer is read whole; see `Source.whole_experts`."""
    count, k, num_tokens = layer
    found = expected_experts(count, k, num_tokens)
    return (
        f"{READS_ALL}: {num_tokens:,} tokens choose {k} each, and so {found:.3g} of "
        f"{count} if all are equally likely."
    )


def _expected(plan: Plan) -> str:
    fetches = [x for x in plan.instructions if isinstance(x.operation, FetchChosen)]
    return (
        f"Each pass reads the experts that its tokens choose, and no others: "
        f"{show_bytes(sum(x.nbytes for x in fetches))} a step are expected if all are "
        "equally likely."
    )


def stream_segments(
    setup: Setup,
    segmented: Segmented,
    compiled: Compiled,
    limits: Limits,
    homes: Mapping[ArrayId, Tier] | None = None,
    weight: StepWeight | None = None,
) -> Streamed:
    """The fastest step of these segments that fits the budgets.

    Args:
        limits: those of the segments.
        homes: the tiers where arrays rest; None places them.
        weight: of the step.

    Raises:
        InfeasibleError: no plan fits.
    """
    segments, layouts = compiled.segments, compiled.layouts
    program = replace(segmented.program, segments=tuple(s.spec for s in segments))
    spaces = [s.workspace() for s in segments]
    rest = {"accumulates": accumulates(setup, program), "layouts": layouts}
    updates = compile_program_updates(program, setup.problem, setup.separated, **rest)
    part_sums = compile_part_sums(program, setup.problem, **rest)
    options = StepOptions(
        num_microbatches=setup.config.num_microbatches,
        updates_in_backward=not setup.waits,
        value_tier=setup.config.activation_tier or Tier.DEVICE,
        gradient_tier=Tier.HOST,
    )
    catalog = make_catalog(
        program,
        layouts,
        resting_pieces(layouts, program, homes),
        homes,
        workspace=[(w.forward_bytes, w.backward_bytes) for w in spaces],
        num_contributions=count_contributions(program, options.num_microbatches),
        rates=setup.rates(),
        exchange=segment_exchanges(segments),
        part_sums=part_sums.costs,
        norm_classes=setup.separated.norm_groups.classes,
    )
    choices = by_time = _choices(setup)
    if setup.config.keeps_residuals:
        levels = (False, True)
        keepings = tuple(partial(what_may_be_kept, segments, x) for x in levels)
        choices = replace(choices, keepings=keepings)
    search_rest = updates.units, setup.capacity(), options, choices
    placed: list[Resident] = []
    if homes is not None:
        search = partial(build_at_home, catalog, *search_rest)
    else:
        placed = residents(catalog, setup.config)
        search = partial(setup.build_placed, catalog, placed, *search_rest)
    step, earlier = Step(catalog, placed, *search_rest), EarlierPlan()
    # Several processes would have to agree on whether one of them searches, and what a
    # program takes on another machine is that machine's compiler's to say.
    if setup.group.count == 1 and setup.topology is None:
        earlier = earlier_plan(step, segments, updates, mesh=setup.rule.mesh)
    arranged, joint = grouped(earlier.arranged(step, search), updates)
    prove(arranged)
    return Streamed(
        plan=arranged.plan,
        layouts=layouts,
        weight=weight,
        arranged=arranged,
        segmented=replace(segmented, program=program),
        segments=keeping_as_chosen(segments, arranged.catalog.keeping),
        updates=updates,
        part_sums=part_sums,
        joint=joint,
        compute_dtype=jnp.dtype(setup.config.compute_dtype),
        limits=limits,
        choices=by_time,
        earlier=earlier,
    )


def _choices(setup: Setup) -> Choices:
    """The options that the search may choose, where the config leaves them open."""

    tiers, asked = open_tiers(setup.capacity()), setup.config.activation_tier
    return Choices(
        tiers if asked is None else (asked,),
        tiers[Tier.HOST.order :],
        setup.config.persistence_bytes,
        update_tiers=(Tier.DEVICE,),
        turns=(2,),
        defers=setup.may_defer,
        # On several devices, rows of a shard are not rows of the whole array.
        by_row=setup.rule.mesh.size == 1,
    )
