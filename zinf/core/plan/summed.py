"""The updates from gradients that rest between steps, as a plan of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zinf.core.plan.catalog import Catalog, StepOptions, UpdateUnit
from zinf.core.plan.choose import Arrangement, UnitsFor, faster
from zinf.core.plan.infeasible import InfeasibleError
from zinf.core.plan.instruction import Decide
from zinf.core.plan.job import JobList
from zinf.core.plan.norms import add_norms
from zinf.core.plan.passage import Passage, checked, proven, streamed
from zinf.core.plan.updates import Updates
from zinf.core.program import ArrayId, Tier

# By the segment that completes them, in the order of a step: norms have its bits.
Gradients = Mapping[str, Sequence[ArrayId]]


def build_updates(
    catalog: Catalog,
    units_for: UnitsFor,
    gradients: Gradients,
    capacity_bytes: Mapping[Tier, int],
) -> Arrangement:
    """The fastest updates from gradients at the homes of the catalog.

    Raises:
        InfeasibleError: they fit with updates neither on the host nor on the device.
    """
    options = StepOptions(1, False, Tier.DEVICE, Tier.HOST)
    best, error = None, None
    for tier in (Tier.HOST, Tier.DEVICE):
        units = tuple(units_for(catalog.homes, tier, 0))
        own = replace(options, update_tier=tier)
        passage = _passage(catalog, units, gradients, own)
        try:
            plan = checked(streamed(passage, catalog, capacity_bytes), passage, catalog)
        except InfeasibleError as found:
            error = error or proven(found, passage, catalog)
            continue
        arranged = Arrangement(plan, catalog, units, own)
        best = arranged if best is None else faster(best, arranged)
    if best is None:
        assert error is not None
        raise error
    return best


def _passage(
    catalog: Catalog,
    units: Sequence[UpdateUnit],
    gradients: Gradients,
    options: StepOptions,
) -> Passage:
    jobs, norms = JobList(), list[ArrayId]()
    for segment, some in gradients.items():
        found = add_norms(jobs, catalog, segment, some)
        if found:
            jobs.transfer(found, Tier.DEVICE, Tier.HOST)
        norms += found
    jobs.add_host(Decide((), tuple(norms)), norms)
    Updates(jobs, catalog, units, options).add_ready(lambda gradient: True)
    return Passage(jobs, [], [])
