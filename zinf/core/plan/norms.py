"""Adds the norms of gradients to the jobs of a plan."""

from collections.abc import Sequence

from zinf.core.plan.catalog import Catalog, norm_of
from zinf.core.plan.instruction import SumSquares
from zinf.core.plan.job import JobList
from zinf.core.program import ArrayId, Link, Tier


def add_norms(
    jobs: JobList, catalog: Catalog, segment: str, gradients: Sequence[ArrayId]
) -> list[ArrayId]:
    """Adds the sums of squares of gradients of a segment, one for each class."""
    norms = []
    for number, some in catalog.by_norm_class(gradients).items():
        norms.append(norm_of(segment, number))
        jobs.add(
            SumSquares(tuple(some), norms[-1]),
            Link.DEVICE,
            reads=tuple((a, Tier.DEVICE) for a in some),
            writes=((norms[-1], Tier.DEVICE),),
        )
    return norms
