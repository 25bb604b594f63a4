"""The residuals that segments may save for their backward pass instead of remat."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zinf.core.plan import Keeping
from zinf.core.segment import Segment


def what_may_be_kept(
    segments: Sequence[Segment], is_selective: bool, room_bytes: int
) -> dict[int, Keeping]:
    """The residuals that each segment may save, by segment number.

    A segment whose residuals exceed `room_bytes` is left out and not compiled.

    Args:
        is_selective: recompute matmuls that are cheap for their size, save the rest.
    """
    may_keep = {k: s for k, s in enumerate(segments[:-1]) if s.spec.has_backward}
    found = {}
    for k, segment in may_keep.items():
        if is_selective:
            segment = segment.selective()
        residuals = segment.residuals()
        if residuals and sum(spec.nbytes for spec in residuals) <= room_bytes:
            workspace = segment.keeping_workspace()
            passes = workspace.forward_bytes, workspace.backward_bytes
            again = segment.keeping.halves.flops_again
            found[k] = Keeping(residuals, passes, segment.is_selective, again)
    return found


def keeping_as_chosen(
    segments: Sequence[Segment], keeping: Mapping[int, Keeping]
) -> tuple[Segment, ...]:
    """The segments, set to save all or selected residuals as `keeping` says."""
    return tuple(
        replace(s, is_selective=k in keeping and keeping[k].is_selective)
        for k, s in enumerate(segments)
    )
