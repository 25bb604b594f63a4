"""Finds consecutive segments with one body that can run as a loop over layers.

A loop has one body however many layers there are. It reads a different parameter array
at each position in each iteration, and passes what it computes on to the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zinf.core.program import ArrayId, SegmentSpec


@dataclass(frozen=True)
class Part:
    """Segments that run as one loop, or a single segment.

    Attributes:
        segments: their numbers in the program.
        carried: for each input of a loop, the position of the output of the iteration
            before that it is. None: it has the same value in all iterations.
    """

    segments: range
    carried: tuple[int | None, ...] = ()

    @property
    def from_output(self) -> dict[int, int]:
        """The inputs that are an output of the iteration before, and which one."""
        return {j: o for j, o in enumerate(self.carried) if o is not None}

    @property
    def is_loop(self) -> bool:
        return len(self.segments) > 1


def find_parts(
    specs: Sequence[SegmentSpec], is_alike: Callable[[ArrayId, ArrayId, int], bool]
) -> list[Part]:
    """The segments of a program in order, consecutive equal ones as loops.

    A segment belongs to no loop if it shares a parameter array with another segment, or
    if a later segment than the next one reads what it computes.

    Args:
        is_alike: `(array, other, distance)`: whether a loop may read `other` where it
            read `array` `distance` iterations before.
    """
    found = _Finder(specs, is_alike)
    parts = []
    first = 0
    while first < len(specs):
        part = found.longest(first)
        parts.append(part)
        first = part.segments.stop
    return parts


class _Finder:
    def __init__(
        self,
        specs: Sequence[SegmentSpec],
        is_alike: Callable[[ArrayId, ArrayId, int], bool],
    ):
        self.specs, self.is_alike = specs, is_alike
        self.readers: dict[str, set[int]] = {}
        self.users: dict[ArrayId, int] = {}
        for number, spec in enumerate(specs):
            for name in spec.inputs:
                self.readers.setdefault(name, set()).add(number)
            for array in spec.params:
                self.users[array] = self.users.get(array, 0) + 1

    def longest(self, first: int) -> Part:
        """The longest loop that begins with a segment, or that segment alone."""
        stop, carried = first + 1, None
        while stop < len(self.specs) and self.may_follow(first, stop):
            link = self.link(stop)
            if link is None or (carried is not None and link != carried):
                break
            carried = link
            stop += 1
        return Part(range(first, stop), carried or ())

    def may_follow(self, first: int, number: int) -> bool:
        """Whether a loop that begins with `first` may have this segment."""
        spec, other = self.specs[first], self.specs[number]
        if spec.body != other.body or not spec.params:
            return False
        if any(self.users[array] > 1 for array in (*spec.params, *other.params)):
            return False
        pairs = zip(spec.params, other.params, strict=True)
        return all(self.is_alike(*pair, number - first) for pair in pairs)

    def link(self, number: int) -> tuple[int | None, ...] | None:
        """`Part.carried` of a segment after the one before it; None: not one loop."""
        before, spec = self.specs[number - 1], self.specs[number]
        if any(self.readers.get(name) != {number} for name in before.outputs):
            return None
        link: list[int | None] = []
        for name, earlier in zip(spec.inputs, before.inputs, strict=True):
            if name in before.outputs:
                link.append(before.outputs.index(name))
            elif name == earlier:
                link.append(None)
            else:
                return None
        return tuple(link)
