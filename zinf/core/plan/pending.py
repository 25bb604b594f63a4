"""Deferred updates, which a step leaves to the next one. [Note: pending updates]

No job needs the results of an update before the next forward pass of its segment. So a
step may defer updates and end with their gradients at rest. Each deferred update runs
in the next step, just before the forward pass that reads its results, while earlier
segments compute. The results are exact: the update uses the same gradients and the same
decision, and no value is read in between.

Deferring hides updates that need the norm of the whole gradient, which is known only
after the backward pass. It also keeps the drive busy in the forward pass. (GreedySnake,
arXiv:2512.17570, overlaps a part of the optimizer step with the next forward pass.)

Between two steps a deferred update is *pending*. `params`, evaluation and checkpoints
run all pending updates before they read parameters or state.
"""

from collections.abc import Collection, Mapping, Sequence

from zinf.core.plan.catalog import Catalog, StepOptions, UpdateUnit
from zinf.core.plan.instruction import Copy
from zinf.core.program import ArrayId, Rows, Tier


def not_read_first(units: Sequence[UpdateUnit], catalog: Catalog) -> frozenset[int]:
    """Numbers of the units whose results the first segment does not read.

    If the other units were deferred, the first segment would wait for them. They may be
    large: tables of embeddings are.
    """
    readers = catalog.program.first_readers()
    return frozenset(i for i, unit in enumerate(units) if first_reader(unit, readers))


def first_reader(unit: UpdateUnit, readers: Mapping[tuple[str, Rows], int]) -> int:
    """The first segment that reads a result of the unit.

    `readers` is `Program.first_readers()`.
    """
    return min(readers[x.gradient.path, x.gradient.rows] for x in unit.arrays)


def rest_tier(unit: UpdateUnit, catalog: Catalog, options: StepOptions) -> Tier:
    """The tier where gradients of a unit wait for an update after the backward pass.

    It is the device if all results of the unit rest there, and `gradient_tier` if not.
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
