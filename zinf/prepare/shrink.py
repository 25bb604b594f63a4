"""How a step is made smaller that does not fit the device.

Its segments get fewer parameters, where weights that are larger than that are read by
tile; or, where intermediate values take most, run in blocks of rows. Tiles are updated
whole, so they may be too large for the host too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from zinf.plan import InfeasibleError, Shortage
from zinf.program import ArrayId, Program, Tier
from zinf.segment import Segment

# What is asked to be smaller leaves a sixteenth more room than is missing.
SPARE = 16


@dataclass(frozen=True)
class Limits:
    """What a segment may hold; None is no limit.

    Attributes:
        param_bytes: of parameters.
        workspace_bytes: of intermediate values, if its rows are independent.
    """

    param_bytes: int | None
    workspace_bytes: int | None = None


def tighter(
    limits: Limits,
    error: InfeasibleError,
    segments: Sequence[Segment],
    program: Program,
) -> Limits | None:
    """Limits with which to try again; None: give up.

    Args:
        error: what was missing with `segments`, which are of `program`.
    """
    params = largest_segment_bytes(program)
    if Tier.DEVICE not in error.shortages:
        if Tier.HOST in error.shortages and program.tilings:
            return _with_fewer_params(limits, params, error.shortages[Tier.HOST])
        return None
    short = error.shortages[Tier.DEVICE]
    spaces = [s.workspace() for s in segments]
    workspace = max(max(w.forward_bytes, w.backward_bytes) for w in spaces)
    may_shrink = limits.workspace_bytes is None or workspace <= limits.workspace_bytes
    # Blocks of rows change nothing else, so they come first where they are enough.
    if may_shrink and workspace > short.missing_bytes:
        enough = workspace - short.missing_bytes
        return replace(limits, workspace_bytes=enough - enough // SPARE)
    # A gradient is as large as its parameter.
    if may_shrink and workspace > 2 * params:
        return replace(limits, workspace_bytes=workspace // _divisor(short))
    return _with_fewer_params(limits, params, short)


def _with_fewer_params(limits: Limits, params: int, short: Shortage) -> Limits | None:
    if params <= 1:
        return None
    return replace(limits, param_bytes=params // _divisor(short))


def _divisor(short: Shortage) -> int:
    return max(2, short.needed_bytes // max(1, short.capacity_bytes))


def is_worth_trying(
    program: Program, before: Program, capacity_bytes: int, num_devices: int
) -> bool:
    """Whether a program, if it is another, has smaller segments, and may fit.

    Where values alone are too large, compiling would take long in vain.
    """
    shrinks = largest_segment_bytes(program) < largest_segment_bytes(before)
    fits = _value_bytes(program) // num_devices <= capacity_bytes
    return fits and (shrinks or program is before)


def reasons(program: Program, segments: Sequence[Segment]) -> list[str]:
    """Why nothing could be made smaller, in sentences."""
    wholes = {s.spec.name: s.why_whole for s in segments if s.why_whole}
    bodies = {why: name for name, why in reversed(wholes.items())}
    return untiled(program) + [
        f"Segment {name!r} cannot run in smaller blocks of rows: {why}."
        for why, name in bodies.items()
    ]


def untiled(program: Program) -> list[str]:
    """Why weights that are too large are not read by tile, in sentences."""
    return [
        f"The parameter {path!r} cannot be read by tile: {reason}."
        for path, reason in program.untiled.items()
    ]


def largest_segment_bytes(program: Program) -> int:
    """Parameter bytes of the segment that holds most."""
    specs = {leaf.path: leaf.spec for leaf in program.leaves}

    def nbytes(array: ArrayId) -> int:
        spec = specs[array.path]
        return (spec.rows(*array.rows) if array.rows else spec).nbytes

    return max(sum(map(nbytes, s.params)) for s in program.segments)


def _value_bytes(program: Program) -> int:
    """What a segment reads and makes at most, but for parameters."""

    def nbytes(names: Collection[str]) -> int:
        return sum(program.values[name].nbytes for name in names)

    return max(nbytes({*s.inputs, *s.outputs}) for s in program.segments)
