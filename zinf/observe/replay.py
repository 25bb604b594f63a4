"""Predicts how long a measured step would take if a link were faster."""

from collections.abc import Mapping, Sequence

from zinf.observe.traced import Span


def replay(spans: Sequence[Span], speedups: Mapping[str, float]) -> float:
    """Seconds of a step, simulated by the rule of the executor.

    Each link runs its instructions in the order of the plan. An instruction starts when
    its link is idle and the instructions that it waits for are done.

    Args:
        spans: all instructions of a step, frees included.
        speedups: factor by which a link is faster; 1 for links that are not named.
    """
    free_at: dict[str, float] = {}
    ends: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span.instruction):
        start = max([free_at.get(span.link, 0.0), *(ends[i] for i in span.after)])
        end = start + (span.end - span.start) / speedups.get(span.link, 1.0)
        free_at[span.link] = ends[span.instruction] = end
    return max(ends.values(), default=0.0)


def busy_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Total busy time of each link that has instructions."""
    busy: dict[str, float] = {}
    for span in spans:
        busy[span.link] = busy.get(span.link, 0.0) + span.end - span.start
    return busy
