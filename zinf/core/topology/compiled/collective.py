"""The collectives of a compiled program, and the matmuls that hide them."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import jax

from zinf.core.topology.compiled.find import KINDS, Kind, Site, sites
from zinf.core.topology.compiled.flops import flops_between
from zinf.core.topology.compiled.group import group_size, num_senders
from zinf.core.topology.compiled.hlo import Module, parse
from zinf.core.topology.compiled.loop import Visit, visits
from zinf.core.topology.compiled.shape import nbytes


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program; bytes and flops are per device and execution.

    Attributes:
        group_size: devices of one group; for a permute, the devices that send.
        times: executions per run of the program; iterations of loops count.
        is_exact: False if the collective is in a loop with an unknown trip count, which
            `times` counts once.
        is_async: the device may do other work before the collective ends.
        overlapped_flops: flops of the matmuls that are issued between its start and its
            end, or the end of its computation.
        overlapped_matmuls: the number of those matmuls.
    """

    name: str
    kind: Kind
    group_size: int
    operand_bytes: int
    result_bytes: int
    times: int
    is_exact: bool
    is_async: bool
    overlapped_flops: int
    overlapped_matmuls: int

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes that a device sends in one execution, by the ring algorithm.

        Each device sends all but 1/n of the whole array. An all-reduce is a
        reduce-scatter and an all-gather. In a permute a device sends its operand.
        """
        n = self.group_size
        if self.kind == "collective-permute":
            return Fraction(self.operand_bytes if n else 0)
        passes = 2 if self.kind == "all-reduce" else 1
        whole = max(self.operand_bytes, self.result_bytes)
        return Fraction(passes * whole * (n - 1), n)


@dataclass(frozen=True)
class Traffic:
    """Sums over all collectives of one kind, per device and run of the program.

    Attributes:
        overlapped_bytes: those of `sent_bytes` that matmuls overlap.
    """

    count: int
    operand_bytes: int
    result_bytes: int
    sent_bytes: int
    overlapped_bytes: int
    async_count: int
    is_exact: bool

    @property
    def overlapped_share(self) -> float:
        """The share of the bytes sent that matmuls overlap."""
        return self.overlapped_bytes / self.sent_bytes if self.sent_bytes else 0.0


def collectives(text: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program.

    Args:
        text: the result of `jax.stages.Compiled.as_text()`.

    Raises:
        ValueError: the text is not a compiled program.
        NotImplementedError: the program has a collective that this cannot read.
    """
    module = parse(text)
    return tuple(
        _collective(module, visit, site)
        for visit in visits(module)
        for site in sites(module, visit.computation)
    )


def collectives_of(compiled: jax.stages.Compiled) -> tuple[Collective, ...]:
    """The collectives of an executable, read from its text."""
    text = compiled.as_text()
    assert text is not None, "this backend does not show what it compiled"
    return collectives(text)


def traffic(found: Iterable[Collective]) -> dict[Kind, Traffic]:
    """The sums for each kind of collective that occurs."""
    by_kind: dict[Kind, list[Collective]] = {}
    for one in found:
        by_kind.setdefault(one.kind, []).append(one)
    return {kind: _sum(by_kind[kind]) for kind in KINDS if kind in by_kind}


def _sum(same: list[Collective]) -> Traffic:
    return Traffic(
        count=sum(c.times for c in same),
        operand_bytes=sum(c.times * c.operand_bytes for c in same),
        result_bytes=sum(c.times * c.result_bytes for c in same),
        sent_bytes=_sent_bytes(same),
        overlapped_bytes=_sent_bytes(c for c in same if c.overlapped_matmuls),
        async_count=sum(c.times for c in same if c.is_async),
        is_exact=all(c.is_exact for c in same),
    )


def _sent_bytes(found: Iterable[Collective]) -> int:
    return round(sum(c.times * c.sent_bytes for c in found))


def _collective(module: Module, visit: Visit, site: Site) -> Collective:
    scheduled = visit.computation
    flops, matmuls = 0, 0
    if site.is_async:
        flops, matmuls = flops_between(
            module,
            scheduled,
            scheduled.position[site.issued.name],
            scheduled.position[site.ended.name]
            if site.ended
            else len(scheduled.instructions),
        )
    attributes = site.operation.attributes
    is_permute = site.kind == "collective-permute"
    return Collective(
        name=site.issued.name,
        kind=site.kind,
        group_size=num_senders(attributes)
        if is_permute
        else group_size(attributes, module.num_devices),
        operand_bytes=nbytes(site.inside.operand_leaves(site.operation)),
        result_bytes=nbytes(site.results),
        times=visit.times,
        is_exact=visit.is_exact,
        is_async=site.is_async,
        overlapped_flops=flops,
        overlapped_matmuls=matmuls,
    )
