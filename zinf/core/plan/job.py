"""The jobs of a step: its operations, before `stream` adds fetches and frees."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from zinf.core.plan.instruction import NO_EXCHANGE, Copy, Exchange, Operation, Transfer
from zinf.core.program import ROUTES, TRANSFER_LINKS, ArrayId, Link, Tier


@dataclass(frozen=True, slots=True)
class Job:
    """An operation with the copies that it reads and writes."""

    operation: Operation
    link: Link
    reads: tuple[Copy, ...]
    writes: tuple[Copy, ...]
    workspace: tuple[tuple[Tier, int], ...] = ()
    flops: int = 0
    exchange: Exchange = NO_EXCHANGE
    consumes: tuple[ArrayId, ...] = ()
    """Arrays whose present content no later job needs."""


class JobList(list[Job]):
    """Jobs in the order in which they are added."""

    def add(self, operation: Operation, link: Link, **rest: Any) -> None:
        self.append(Job(operation, link, **rest))

    def add_host(self, operation: Operation, reads: Sequence[ArrayId]) -> None:
        copies = tuple((a, Tier.HOST) for a in reads)
        self.add(operation, Link.HOST, reads=copies, writes=())

    def transfer(
        self,
        arrays: Sequence[ArrayId],
        source: Tier,
        target: Tier,
        *,
        workspace_bytes: int = 0,
    ) -> None:
        """Adds the transfers of arrays from tier to tier, one job for each hop.

        Args:
            workspace_bytes: workspace of each hop on its source tier.
        """
        for start, stop in pairwise(ROUTES[source, target]):
            workspace = ((start, workspace_bytes),)
            self.append(replace(hop(arrays, start, stop), workspace=workspace))


def hop(arrays: Sequence[ArrayId], source: Tier, target: Tier) -> Job:
    """The transfer of arrays over one link."""
    return Job(
        Transfer(tuple(arrays), source, target),
        TRANSFER_LINKS[source, target],
        reads=tuple((a, source) for a in arrays),
        writes=tuple((a, target) for a in arrays),
    )
