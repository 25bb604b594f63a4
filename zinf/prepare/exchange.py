"""What executables send between devices, as the plan counts it."""

from collections.abc import Iterable, Sequence

from zinf.plan import Exchange
from zinf.segment import Segment
from zinf.topology import Collective


def exchange_of(collectives: Iterable[Collective]) -> Exchange:
    """The bytes that a device sends; those are hidden that products run beside."""
    hidden, exposed = 0, 0
    for one in collectives:
        sent = round(one.sent_bytes * one.times)
        if one.overlapped_products:
            hidden += sent
        else:
            exposed += sent
    return Exchange(hidden, exposed)


def forward_exchanges(segments: Sequence[Segment]) -> list[Exchange]:
    """What the forward pass of each segment sends, where only forward passes run."""
    return [exchange_of(segment.forward_traffic()) for segment in segments]


def segment_exchanges(segments: Sequence[Segment]) -> list[tuple[Exchange, Exchange]]:
    """What the forward and the backward pass of each segment send."""
    found = []
    for segment in segments:
        passes = segment.traffic()
        forward, backward = passes.get("forward", ()), passes.get("backward", ())
        found.append((exchange_of(forward), exchange_of(backward)))
    return found
