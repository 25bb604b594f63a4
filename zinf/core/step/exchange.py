"""Bytes that executables send between devices, in the form that the plan counts."""

from collections.abc import Collection, Iterable, Sequence

from zinf.core.plan import Exchange
from zinf.core.segment import Segment
from zinf.core.sharding import Layouts
from zinf.core.topology import Collective

# Leaves of a kind that a sentence names.
MAX_NAMED = 3


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


def exchange_in_words(
    trained: Sequence[str], layouts: Layouts, in_parts: Collection[str]
) -> str:
    """A sentence on which gradients devices exchange in few bits, and why not others.

    Args:
        trained: the paths of the trained leaves.
        in_parts: those whose gradients are parts until they are exchanged.
    """
    small = [path for path in trained if path not in layouts.parts]
    others = [path for path in layouts.parts if path not in in_parts]
    plain = [
        f"{len(paths)} {why} ({', '.join(paths[:MAX_NAMED])}"
        f"{', ...' if len(paths) > MAX_NAMED else ''})"
        for paths, why in (
            (small, "with one dim or few numbers"),
            (others, "that are not computed as sums over examples"),
        )
        if paths
    ]
    rest = f"; as they are, {' and '.join(plain)}" if plain else ""
    count = len(trained) - len(small) - len(others)
    compression = layouts.rule.compression
    if compression is not None:
        return f"{compression.in_words(count)}{rest}."
    return f"Gradients of {count} leaves are exchanged as 4-bit integers{rest}."
