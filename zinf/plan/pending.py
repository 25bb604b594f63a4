"""Updates that a step leaves to the next one. [Note: pending updates]

An update needs its gradient, and nothing needs its results before the next forward pass
of its segment. So a step may end with gradients at rest, whose updates run at the
beginning of the next step, each just before the forward pass that reads what it
updates, while the segments before it compute. That is exact: the same gradients, the
same decision, and no value is read in between. It is how updates that wait for the norm
of the whole gradient, and so for the end of the backward pass, are hidden; and it keeps
the drive busy in the forward pass too (a part of the optimizer step is overlapped with
the next forward pass in GreedySnake, arXiv:2512.17570).

Whoever looks at parameters or state in between (`params`, evaluation, a checkpoint)
runs what is pending first.
"""

from collections.abc import Collection, Sequence

from zinf.plan.catalog import Catalog, StepOptions, UpdateUnit
from zinf.plan.instruction import Copy
from zinf.program import ArrayId, Tier


def deferred_units(units: Sequence[UpdateUnit], share: float) -> frozenset[int]:
    """Numbers of the units whose updates are left to the next step.

    They are spread evenly over the step, as what a pass moves then is in proportion to
    what it computes. The last one, whose gradient is complete last and whose results
    are needed first, comes in only with all others.
    """
    counted = [int(i * share + 1e-9) for i in range(len(units) + 1)]
    passed = [b > a for a, b in zip(counted, counted[1:], strict=False)]
    shifted = [*passed[1:], share >= 1]
    return frozenset(i for i, is_deferred in enumerate(shifted) if is_deferred)


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
