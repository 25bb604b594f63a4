"""Updates that a step leaves to the next one. [Note: pending updates]

An update needs its gradient, and nothing needs its results before the next forward pass
of its segment. So a step may end with gradients at rest, whose updates run at the
beginning of the next step, each just before the forward pass that reads what it
updates, while the segments before it compute. That is exact: the same gradients, the
same decision, and no value is read in between. It is how updates that wait for the norm
of the whole gradient, and so for the end of the backward pass, are hidden; and it keeps
the drive busy in the forward pass too (a part of the optimizer step is overlapped with
the next forward pass in GreedySnake, arXiv:2512.17570).

The smallest of them may go before all else, wherever their segments are: the drive has
something to write then while larger ones are read. (That is the order by which two
machines that every job passes are done first, where the second takes longer: Johnson,
"Optimal two- and three-stage production schedules", 1954.)

Whoever looks at parameters or state in between (`params`, evaluation, a checkpoint)
runs what is pending first.
"""

from collections.abc import Collection, Mapping, Sequence

from zinf.plan.catalog import Catalog, StepOptions, UpdateUnit
from zinf.plan.instruction import Copy
from zinf.plan.plan import Plan
from zinf.program import ArrayId, Rows, Tier


def spread(
    units: Sequence[UpdateUnit], share: float, catalog: Catalog
) -> frozenset[int]:
    """Numbers of units that change such a share of all bytes, evenly over the step.

    So what a pass moves is in proportion to what it computes.
    """
    found, due = [], 0.0
    for number, unit in enumerate(units):
        nbytes = changed_bytes(unit, catalog)
        due += share * nbytes
        if due >= nbytes:
            found.append(number)
            due -= nbytes
    return frozenset(found)


def changed_bytes(unit: UpdateUnit, catalog: Catalog) -> int:
    """Of the results of a unit."""
    results = (a for update in unit.arrays for a in update.results)
    return sum(catalog.nbytes(a, unit.tier) for a in results)


def home_last(plan: Plan, units: Sequence[UpdateUnit], count: int) -> frozenset[int]:
    """Numbers of the units of this step whose results are home last."""
    owners = {a: n for n, u in enumerate(units) for x in u.arrays for a in x.results}
    ends: dict[int, float] = {}
    for index in plan.own_changes:
        for array, _ in plan.instructions[index].writes:
            ends[owners[array]] = plan.timeline.end[index]
    return frozenset(sorted(ends, key=ends.__getitem__)[-count:])


def not_read_first(units: Sequence[UpdateUnit], catalog: Catalog) -> frozenset[int]:
    """Numbers of the units of which the first segment reads nothing.

    For the others it would have to wait. They may be large, as tables of embeddings.
    """
    readers = catalog.program.first_readers()
    return frozenset(i for i, unit in enumerate(units) if first_reader(unit, readers))


def first_reader(unit: UpdateUnit, readers: Mapping[tuple[str, Rows], int]) -> int:
    """The first segment that reads what a unit updates, of `Program.first_readers`."""
    return min(readers[x.gradient.path, x.gradient.rows] for x in unit.arrays)


def rest_tier(unit: UpdateUnit, catalog: Catalog, options: StepOptions) -> Tier:
    """Where the gradients of a unit wait for a late update.

    On the device only where all that they are for rests there.
    """
    results = [a for update in unit.arrays for a in update.results]
    if all(catalog.home_tier(a) == Tier.DEVICE for a in results):
        return Tier.DEVICE
    return options.gradient_tier


def pending_copies(
    units: Sequence[UpdateUnit],
    deferred: Collection[int],
    catalog: Catalog,
    options: StepOptions,
) -> list[Copy]:
    """The gradients that are at rest between steps."""
    found: dict[ArrayId, Tier] = {}
    for number in sorted(deferred):
        tier = rest_tier(units[number], catalog, options)
        found.update((u.gradient, tier) for u in units[number].arrays)
    return list(found.items())
