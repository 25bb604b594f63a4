"""The jobs of one plan, with the copies that exist before and after them.

A training run has four passages: the step; the first step, before which no update is
pending; the flush, which runs only the pending updates; and the forward pass alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zinf.core.plan.catalog import Catalog, StepOptions, UpdateUnit, value
from zinf.core.plan.check import check
from zinf.core.plan.infeasible import InfeasibleError
from zinf.core.plan.instruction import Copy
from zinf.core.plan.pending import pending_copies
from zinf.core.plan.plan import Plan
from zinf.core.plan.schedule import (
    Job,
    schedule,
    schedule_flush,
    schedule_forward,
)
from zinf.core.plan.stream import stream
from zinf.core.program import KEY, Program, Tier


@dataclass(frozen=True, slots=True)
class Passage:
    """Jobs that become one plan, and what exists before and after them.

    Attributes:
        jobs: the jobs, in order.
        initial: copies away from home that exist before the first job.
        final: copies away from home that exist after the last job.
    """

    jobs: list[Job]
    initial: list[Copy]
    final: list[Copy]


def step_passage(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> Passage:
    """A training step that follows another."""
    jobs = schedule(catalog, units, options)
    inputs, results = _boundary(jobs, catalog, options)
    pending = _pending(catalog, units, options)
    return Passage(jobs, inputs + pending, results + pending)


def first_passage(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> Passage:
    """A training step before which no update is pending."""
    jobs = schedule(catalog, units, options, is_first=True)
    inputs, results = _boundary(jobs, catalog, options)
    left = results + _pending(catalog, units, options)
    return Passage(jobs, inputs, left)


def flush_passage(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> Passage:
    """The pending updates alone."""
    jobs = schedule_flush(catalog, units, options)
    return Passage(jobs, _pending(catalog, units, options), [])


def forward_passage(catalog: Catalog, options: StepOptions) -> Passage:
    """A forward pass alone; all outputs of the program end on the host."""
    jobs = schedule_forward(catalog, options)
    return Passage(jobs, *_boundary(jobs, catalog, options))


def streamed(
    passage: Passage, catalog: Catalog, capacity_bytes: Mapping[Tier, int]
) -> Plan:
    """The plan of a passage, with arrays at the homes of the catalog; not checked yet.

    Raises:
        InfeasibleError: some tier is too small. Its `needed_bytes` may not suffice;
            `proven` finds budgets that do.
    """
    return stream(
        passage.jobs,
        catalog,
        capacity_bytes,
        initial=passage.initial,
        final=passage.final,
    )


def checked(plan: Plan, passage: Passage, catalog: Catalog) -> Plan:
    """The plan, after `check` has proved it. Every plan that runs went through here.

    Raises:
        PlanError: see `check`.
    """
    held = dict.fromkeys(Tier, 0)
    for array, tier in passage.initial:
        held[tier] += catalog.nbytes(array, tier)
    check(plan, passage.initial, held, passage.final)
    return plan


def proven(
    error: InfeasibleError, passage: Passage, catalog: Catalog
) -> InfeasibleError:
    """The error with budgets for which a plan was built, so they suffice.

    Raising a budget changes which copies exist when a job starts, so then another job
    may need most. Budgets are raised until a plan fits.
    """
    shortages = dict(error.shortages)
    while True:
        budgets = {tier: short.needed_bytes for tier, short in shortages.items()}
        try:
            streamed(passage, catalog, {**error.capacity_bytes, **budgets})
        except InfeasibleError as further:
            for tier, short in further.shortages.items():
                asked_bytes = error.capacity_bytes[tier]
                shortages[tier] = replace(short, capacity_bytes=asked_bytes)
        else:
            return InfeasibleError(shortages, error.capacity_bytes)


def initial_copies(program: Program, num_microbatches: int) -> list[Copy]:
    """Copies that exist when a step starts: batch on the host, keys on the device."""
    return [
        (value(name, m), Tier.DEVICE if name == KEY else Tier.HOST)
        for m in range(num_microbatches)
        for name in program.batch
    ]


def final_copies(program: Program, options: StepOptions) -> list[Copy]:
    """Copies that a step leaves on the host: the outputs of the program."""
    return [
        (value(name, m), Tier.HOST)
        for m in range(options.num_microbatches)
        for name in dict.fromkeys(program.outputs_of(m))
    ]


def _boundary(
    jobs: Sequence[Job], catalog: Catalog, options: StepOptions
) -> tuple[list[Copy], list[Copy]]:
    """The inputs that some job reads, and the results."""
    read = {copy[0] for job in jobs for copy in job.reads}
    initial = initial_copies(catalog.program, options.num_microbatches)
    inputs = [c for c in initial if c[0] in read]
    return inputs, final_copies(catalog.program, options)


def _pending(
    catalog: Catalog, units: Sequence[UpdateUnit], options: StepOptions
) -> list[Copy]:
    return pending_copies(units, options.deferred, catalog, options)
