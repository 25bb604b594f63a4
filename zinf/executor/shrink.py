"""How a step is made smaller that does not fit the device: by smaller segments.

Weights that are larger than a segment may hold are then read by tile.
"""

from collections.abc import Collection

from zinf.plan import InfeasibleError
from zinf.program import ArrayId, Program, Tier


def smaller_bytes(error: InfeasibleError, program: Program) -> int | None:
    """The parameter bytes of a segment with which to try again; None: give up.

    Args:
        error: what was missing with the segments of `program`.
    """
    largest = largest_segment_bytes(program)
    if Tier.DEVICE not in error.shortages or largest < 2:
        return None
    short = error.shortages[Tier.DEVICE]
    return largest // max(2, short.needed_bytes // max(1, short.capacity_bytes))


def is_worth_trying(
    program: Program, before: Program, capacity_bytes: int, num_devices: int
) -> bool:
    """Whether a program has smaller segments than another, and may fit the device.

    Where values alone are too large, compiling would take long in vain.
    """
    shrinks = largest_segment_bytes(program) < largest_segment_bytes(before)
    return shrinks and _value_bytes(program) // num_devices <= capacity_bytes


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
