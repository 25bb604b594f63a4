"""Bytes that executables send between devices, in the form that the plan counts."""

from collections.abc import Iterable, Sequence

from zinf.core.plan import Exchange
from zinf.core.segment import Segment
from zinf.core.topology import Collective


def exchange_of(collectives: Iterable[Collective]) -> Exchange:
    """The bytes that one device sends in these collectives.

    The bytes of a collective are hidden if matmuls overlap it, else exposed.
    """
    hidden, exposed = 0, 0
    for one in collectives:
        sent = round(one.sent_bytes * one.times)
        if one.overlapped_matmuls:
            hidden += sent
        else:
            exposed += sent
    return Exchange(hidden, exposed)


def forward_exchanges(segments: Sequence[Segment]) -> list[Exchange]:
    """Exchange of the forward pass of each segment, for an evaluation."""
    return [exchange_of(segment.forward_traffic()) for segment in segments]


def segment_exchanges(segments: Sequence[Segment]) -> list[tuple[Exchange, Exchange]]:
    """Exchanges of the forward and of the backward pass of each segment."""
    found = []
    for segment in segments:
        passes = segment.traffic()
        forward, backward = passes.get("forward", ()), passes.get("backward", ())
        found.append((exchange_of(forward), exchange_of(backward)))
    return found
