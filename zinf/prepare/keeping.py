"""What segments may keep for their backward pass, instead of computing it again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zinf.plan import Keeping
from zinf.segment import Segment


def what_may_be_kept(
    segments: Sequence[Segment], is_selective: bool, room_bytes: int
) -> dict[int, Keeping]:
    """What segments may keep; compiled only if there is room for any of it.

    Args:
        is_selective: but for products that are cheap for their size, if there are any.
    """
    able = {k: s for k, s in enumerate(segments[:-1]) if s.spec.has_backward}
    found = {}
    for k, segment in able.items():
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
    """The segments, which from now on keep what was chosen for each."""
    return tuple(
        replace(s, is_selective=k in keeping and keeping[k].is_selective)
        for k, s in enumerate(segments)
    )
