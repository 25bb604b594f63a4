"""What a step would have taken if a link were faster."""

from collections.abc import Mapping, Sequence

from zinf.observe.traced import Span


def replay(spans: Sequence[Span], speedups: Mapping[str, float]) -> float:
    """Seconds of a step, played again by the rule of the executor.

    Each link works through its instructions in the order of the plan, each as soon as
    all that it waits for are done.

    Args:
        spans: all instructions of a step, those that free included.
        speedups: how many times as fast a link is; 1 where nothing is said.
    """
    free_at: dict[str, float] = {}
    ends: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span.instruction):
        start = max([free_at.get(span.link, 0.0), *(ends[i] for i in span.after)])
        end = start + (span.end - span.start) / speedups.get(span.link, 1.0)
        free_at[span.link] = ends[span.instruction] = end
    return max(ends.values(), default=0.0)


def busy_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """How long each link works in all, of those that have instructions."""
    busy: dict[str, float] = {}
    for span in spans:
        busy[span.link] = busy.get(span.link, 0.0) + span.end - span.start
    return busy
