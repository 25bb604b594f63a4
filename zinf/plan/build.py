"""From a program and its placement to a checked plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from zinf.plan.check import check
from zinf.plan.instruction import (
    FusedStep,
    Instruction,
    Link,
    Plan,
)
from zinf.plan.place import Resident, place
from zinf.plan.schedule import (
    Catalog,
    Copy,
    Job,
    StepOptions,
    UpdateUnit,
    count_contributions,
    schedule,
    schedule_evaluation,
    value,
)
from zinf.plan.stream import InfeasibleError, stream
from zinf.program import ArrayId, ArraySpec, Program, Tier

# A tier gives up room for what moves through it in growing steps until the plan fits.
MAX_ATTEMPTS = 24


def build(
    program: Program,
    specs: Mapping[ArrayId, ArraySpec],
    homes: Mapping[ArrayId, Tier],
    units: Sequence[UpdateUnit],
    workspace: Sequence[tuple[int, int]],
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
) -> Plan:
    """The plan of one training step.

    Args:
        specs: every persistent array, by its home id, including constants.
        homes: the tier where each of them rests.
        units: the optimizer's work, in the order in which it is done.
        workspace: `(forward, backward)` device bytes of each segment's executables.

    Raises:
        InfeasibleError: with the number that would make it feasible.
    """
    counts = count_contributions(program, options.num_microbatches)
    catalog = Catalog(program, specs, homes, workspace, counts)
    return _streamed(
        schedule(catalog, units, options), catalog, capacity_bytes, options
    )


def build_evaluation(
    catalog: Catalog, plan: Plan, last_workspace_bytes: int, num_microbatches: int
) -> Plan:
    """The plan of a forward pass with the arrays where a training plan has them."""
    workspace = [*catalog.workspace[:-1], (last_workspace_bytes, 0)]
    catalog = replace(catalog, homes=plan.homes, workspace=workspace)
    tiers = [Tier.DEVICE, Tier.HOST] + [Tier.NVME] * bool(
        plan.capacity_bytes[Tier.NVME]
    )
    for tier in tiers:
        options = StepOptions(num_microbatches, False, tier, Tier.HOST)
        try:
            jobs = schedule_evaluation(catalog, options)
            return _streamed(jobs, catalog, plan.capacity_bytes, options)
        except InfeasibleError:
            if tier == tiers[-1]:
                raise
    raise AssertionError("no tier")


def _streamed(
    jobs: Sequence[Job],
    catalog: Catalog,
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
) -> Plan:
    read = {copy[0] for job in jobs for copy in job.reads}
    program = catalog.program
    initial = [c for c in initial_copies(program, options) if c[0] in read]
    kept = kept_copies(program, options)
    plan = stream(jobs, catalog, capacity_bytes, initial=initial, kept=kept)
    held = dict.fromkeys(Tier, 0)
    for array, tier in initial:
        held[tier] += catalog.nbytes(array)
    check(plan, initial, held)
    return plan


def initial_copies(program: Program, options: StepOptions) -> list[Copy]:
    """What is there when a step starts: batch on the host, keys on the device."""
    return [
        (value(name, m), Tier.HOST if name.startswith("batch/") else Tier.DEVICE)
        for m in range(options.num_microbatches)
        for name in program.batch
    ]


def kept_copies(program: Program, options: StepOptions) -> list[Copy]:
    """What a step leaves on the host: losses and auxiliary outputs."""
    return [
        (value(name, m), Tier.HOST)
        for m in range(options.num_microbatches)
        for name in (program.loss, *program.aux)
    ]


def build_placed(
    program: Program,
    specs: Mapping[ArrayId, ArraySpec],
    residents: Sequence[Resident],
    units_for: Callable[[Mapping[ArrayId, Tier]], Sequence[UpdateUnit]],
    workspace: Sequence[tuple[int, int]],
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
    *,
    persistence_bytes: int,
    fastest: Tier,
    value_tiers: Iterable[Tier],
    gradient_tiers: Iterable[Tier],
) -> Plan:
    """Places arrays and arranges the step so that the plan fits, fastest first.

    Tries the fastest place for activations and gradients first, and in each case keeps
    free on every tier what the plan turns out to need there. `units_for` gives the
    update units for a placement, since a unit runs where its state rests.

    Raises:
        InfeasibleError: even with everything on the slowest tier allowed.
    """
    failure: InfeasibleError | None = None
    gradient_tiers = tuple(gradient_tiers)
    is_fixed = all(resident.tier is not None for resident in residents)
    for value_tier, gradient_tier in product(value_tiers, gradient_tiers):
        arranged = replace(options, value_tier=value_tier, gradient_tier=gradient_tier)
        reserve = dict.fromkeys(Tier, 0)
        for _ in range(1 if is_fixed else MAX_ATTEMPTS):
            room = {t: capacity_bytes[t] - reserve[t] for t in Tier}
            homes = place(
                residents,
                room,
                persistence_bytes=persistence_bytes,
                fastest=fastest,
            )
            units = units_for(homes)
            try:
                return build(
                    program, specs, homes, units, workspace, capacity_bytes, arranged
                )
            except InfeasibleError as error:
                failure = error
                tier = error.tier
                if reserve[tier] >= capacity_bytes[tier]:
                    break
                least = capacity_bytes[tier] // 16 + 1
                reserve[tier] += max(error.shortage_bytes, least)
    assert failure is not None
    raise failure


def fused_plan(
    homes: Mapping[ArrayId, Tier],
    home_bytes: int,
    workspace_bytes: int,
    capacity_bytes: Mapping[Tier, int],
    flops: int,
) -> Plan:
    """The degenerate plan: one executable, everything on the device.

    Raises:
        InfeasibleError: state and workspace exceed the device budget.
    """
    capacity = capacity_bytes[Tier.DEVICE]
    needed = home_bytes + workspace_bytes
    if needed > capacity:
        raise InfeasibleError(Tier.DEVICE, needed, capacity, "the fused step")
    workspace = ((Tier.DEVICE, workspace_bytes),)
    instruction = Instruction(
        FusedStep(), Link.DEVICE, (), workspace=workspace, flops=flops
    )
    zeros = dict.fromkeys(Tier, 0)
    return Plan(
        (instruction,),
        dict(homes),
        {**zeros, Tier.DEVICE: home_bytes},
        {**zeros, Tier.DEVICE: needed},
        dict(capacity_bytes),
    )
