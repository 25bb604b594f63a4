"""The folder of an array in a checkpoint, and the chunk files in that folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from urllib.parse import quote

from zinf.core.program import ArrayId, ArraySpec
from zinf.core.sharding import Box

# These are not escaped. "." is, so no name can be "..", "zarr.json" or a chunk file.
PLAIN_CHARACTERS = "[](){}=+,:'! @"

Index = tuple[int, ...]
"""The position of a chunk along each dim of the grid."""


@dataclass(frozen=True)
class Grid:
    """A regular grid of chunks over an array, numbered in C order.

    Attributes:
        chunk: shape of every chunk file. The last chunks of a dim may have padding.
    """

    spec: ArraySpec
    chunk: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        pairs = zip(self.spec.shape, self.chunk, strict=True)
        return tuple(-(-size // length) for size, length in pairs)

    @property
    def num_chunks(self) -> int:
        return prod(self.counts)

    @property
    def chunk_bytes(self) -> int:
        return prod(self.chunk) * self.spec.itemsize

    def number(self, index: Index) -> int:
        number = 0
        for place, count in zip(index, self.counts, strict=True):
            number = number * count + place
        return number

    def index(self, number: int) -> Index:
        index: list[int] = []
        for count in reversed(self.counts):
            number, place = divmod(number, count)
            index.append(place)
        return tuple(reversed(index))

    def box(self, index: Index) -> Box:
        """The part of the array that a chunk holds, without padding."""
        return tuple(
            (place * length, min((place + 1) * length, size))
            for place, length, size in zip(
                index, self.chunk, self.spec.shape, strict=True
            )
        )

    def meeting(self, box: Box) -> Iterator[Index]:
        """The chunks that overlap `box`, in C order."""
        if any(low >= high for low, high in box):
            return iter(())
        ranges = [
            range(low // length, -(-high // length))
            for (low, high), length in zip(box, self.chunk, strict=True)
        ]
        return _product(ranges)

    def indices(self) -> Iterator[Index]:
        return map(self.index, range(self.num_chunks))


def _product(ranges: Sequence[range]) -> Iterator[Index]:
    """Like `itertools.product`, without turning the ranges into tuples first.

    A hostile manifest may claim 2**60 chunks. The caller stops at the first chunk file
    that is missing.
    """
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        for rest in _product(ranges[1:]):
            yield (first, *rest)


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def chunk_name(index: Index) -> str:
    """The name of a chunk file, as zarr has it with the separator "."."""
    return ".".join(["c", *map(str, index)])


def folder_name(array: ArrayId) -> str:
    """The folder of an array in a checkpoint: `role/key path`, escaped."""
    return "/".join(map(_escape, (array.kind, *array.path.split("/"))))


def _escape(name: str) -> str:
    """`name` as one component of a file path; no two names give the same one."""
    return quote(name, safe=PLAIN_CHARACTERS).replace(".", "%2E") or "%"
