"""Parses XLA's shapes: `bf16[512,8192]{1,0:T(8,128)(2,1)S(5)}` and tuples of them."""

import math
import re
from dataclasses import dataclass
from functools import cached_property

LEAF = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
DIGITS = re.compile(r"\d+")
# XLA's memory space of pinned host memory.
HOST_SPACE = "S(5)"


@dataclass(frozen=True)
class Leaf:
    """One array: its element type, its shape, and whether it is in host memory."""

    dtype: str
    dims: tuple[int, ...]
    is_on_host: bool

    @property
    def numel(self) -> int:
        return math.prod(self.dims)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the elements, without padding by the layout."""
        return -(-self.numel * _bits(self.dtype) // 8)


def leaves(shape: str) -> tuple[Leaf, ...]:
    """The arrays of a shape, with nested tuples flattened in order."""
    return tuple(
        Leaf(
            dtype,
            tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim),
            HOST_SPACE in layout,
        )
        for dtype, dims, layout in LEAF.findall(shape)
    )


def nbytes(arrays: tuple[Leaf, ...]) -> int:
    return sum(leaf.nbytes for leaf in arrays)


def _bits(dtype: str) -> int:
    """Bits per element: the first number in `bf16`, `f8e4m3fn` or `s4`, or by name."""
    named = {"pred": 8, "token": 0, "opaque": 0}
    if dtype in named:
        return named[dtype]
    found = DIGITS.search(dtype)
    assert found is not None, f"an element type that is not known: {dtype!r}"
    return int(found.group())
