"""What segments may keep for their backward pass, instead of computing it again."""

from collections.abc import Sequence

from zinf.plan import Keeping
from zinf.segment import Segment


def what_may_be_kept(
    segments: Sequence[Segment], room_bytes: int
) -> dict[int, Keeping]:
    """What segments may keep; compiled only if there is room for any of it."""
    able = {k: s for k, s in enumerate(segments[:-1]) if s.spec.has_backward}
    found = {}
    for k, segment in able.items():
        residuals = segment.residuals()
        if residuals and sum(spec.nbytes for spec in residuals) <= room_bytes:
            workspace = segment.keeping_workspace()
            passes = workspace.forward_bytes, workspace.backward_bytes
            found[k] = Keeping(residuals, passes)
    return found
