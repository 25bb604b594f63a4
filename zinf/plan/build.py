"""From a program and its placement to a checked plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zinf.plan.catalog import Catalog, StepOptions, UpdateUnit, value
from zinf.plan.check import check
from zinf.plan.cost import Rates
from zinf.plan.infeasible import InfeasibleError, Shortage
from zinf.plan.instruction import (
    Copy,
    FusedStep,
    Instruction,
    Link,
)
from zinf.plan.place import Resident, place
from zinf.plan.plan import Plan
from zinf.plan.schedule import Job, schedule, schedule_evaluation
from zinf.plan.stream import stream
from zinf.program import ArrayId, Program, Tier

# A tier gives up room for what moves through it in growing steps until the plan fits.
MAX_ATTEMPTS = 24


@dataclass(frozen=True, slots=True)
class Choices:
    """What `build_placed` may choose from, best first.

    `persistence_bytes` is the size under which an array never goes to nvme.
    """

    value_tiers: tuple[Tier, ...]
    gradient_tiers: tuple[Tier, ...]
    persistence_bytes: int


def build(
    catalog: Catalog,
    units: Sequence[UpdateUnit],
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
) -> Plan:
    """The plan of one training step with arrays at the homes of the catalog.

    Args:
        units: the optimizer's work, in the order in which it is done.

    Raises:
        InfeasibleError: with the budgets that would do.
    """
    jobs = schedule(catalog, units, options)
    try:
        return _streamed(jobs, catalog, capacity_bytes, options)
    except InfeasibleError as error:
        raise _proven(error, jobs, catalog, options) from None


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
    check(plan, initial, held, kept)
    return plan


def _proven(
    error: InfeasibleError,
    jobs: Sequence[Job],
    catalog: Catalog,
    options: StepOptions,
) -> InfeasibleError:
    """The error with budgets that were tried and will do.

    With more room, other copies are there when a job starts, so another job may be the
    one that needs most.
    """
    shortages = dict(error.shortages)
    while True:
        budgets = {tier: short.needed_bytes for tier, short in shortages.items()}
        try:
            _streamed(jobs, catalog, {**error.capacity_bytes, **budgets}, options)
        except InfeasibleError as further:
            for tier, short in further.shortages.items():
                asked_bytes = error.capacity_bytes[tier]
                shortages[tier] = replace(short, capacity_bytes=asked_bytes)
        else:
            return InfeasibleError(shortages, error.capacity_bytes)


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
    catalog: Catalog,
    residents: Sequence[Resident],
    units_for: Callable[[Mapping[ArrayId, Tier]], Sequence[UpdateUnit]],
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
    choices: Choices,
) -> Plan:
    """Places arrays and arranges the step so that the plan fits, fastest first.

    Tries the fastest place for activations and gradients first, and in each case keeps
    free on every tier what the plan turns out to need there.

    Args:
        catalog: its homes are not used.
        units_for: the update units for a placement: a unit runs where its state rests.

    Raises:
        InfeasibleError: even with everything on the slowest tier allowed; with the
            budgets of the arrangement that misses least, on the device to begin with.
    """
    failures: list[tuple[InfeasibleError, list[Job], Catalog, StepOptions]] = []
    is_fixed = all(resident.tier is not None for resident in residents)
    for value_tier, gradient_tier in product(
        choices.value_tiers, choices.gradient_tiers
    ):
        arranged = replace(options, value_tier=value_tier, gradient_tier=gradient_tier)
        reserve = dict.fromkeys(Tier, 0)
        for attempt in range(1, 1 + (1 if is_fixed else MAX_ATTEMPTS)):
            if attempt == MAX_ATTEMPTS:
                reserve = dict(capacity_bytes)  # all on the slowest tier allowed
            homes = place(
                residents,
                {t: capacity_bytes[t] - reserve[t] for t in Tier},
                persistence_bytes=choices.persistence_bytes,
            )
            placed = replace(catalog, homes=homes)
            jobs = schedule(placed, units_for(homes), arranged)
            try:
                return _streamed(jobs, placed, capacity_bytes, arranged)
            except InfeasibleError as error:
                failure = error, jobs, placed, arranged
                shortages = error.shortages
            if all(reserve[t] >= capacity_bytes[t] for t in shortages):
                break
            for tier, short in shortages.items():
                least = capacity_bytes[tier] // 16 + 1
                reserve[tier] += max(short.missing_bytes, least)
        failures.append(failure)
    raise _proven(*min(failures, key=lambda failed: failed[0].missing_bytes))


def fused_plan(
    homes: Mapping[ArrayId, Tier],
    home_bytes: int,
    workspace_bytes: int,
    capacity_bytes: Mapping[Tier, int],
    flops: int,
    rates: Rates,
) -> Plan:
    """The degenerate plan: one executable, everything on the device.

    Raises:
        InfeasibleError: state and workspace exceed the device budget.
    """
    capacity = capacity_bytes[Tier.DEVICE]
    needed = home_bytes + workspace_bytes
    if needed > capacity:
        short = Shortage(capacity, needed, "the fused step")
        raise InfeasibleError({Tier.DEVICE: short}, capacity_bytes)
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
        rates,
    )
