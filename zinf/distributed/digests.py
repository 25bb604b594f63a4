"""Checks that all processes begin with the same arrays, by comparing their digests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_128

from zinf.distributed.agreement import differences
from zinf.distributed.group import AbstractGroup

# A non-contiguous array is copied and digested in blocks of this size.
BLOCK_BYTES = 1 << 24
# Number of digests in one message, and of arrays that an error names at most.
PART, MOST_NAMED = 1000, 5


class Digests:
    """Digests of this process's initial values; a run of one process makes none.

    Args:
        group: The processes whose initial values must be equal.
    """

    def __init__(self, group: AbstractGroup) -> None:
        self._group = group
        self._found: dict[str, str] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        """Digest an array on the host: its dtype, shape and every bit of its values."""
        if self._group.count == 1:
            return
        total = xxh3_128(f"{array.dtype}{array.shape}".encode())
        for block in _blocks(np.atleast_1d(array)):
            flat = np.ascontiguousarray(block).reshape(-1)
            total.update(flat.view(np.uint8).data)
        self._found[name] = total.hexdigest()

    def add_text(self, name: str, text: str) -> None:
        """Digest a text under this name."""
        self._found[name] = xxh3_128(text.encode()).hexdigest()

    def agree(self) -> None:
        """Compare the digests of all processes, which must have added the same names.

        Processes first exchange one digest of all their digests. Only if these differ
        do they exchange the digest of each array.

        Raises:
            ValueError: Arrays differ. Raised on every process; names the first arrays
                that differ and their digests in each process.
        """
        if self._group.count == 1:
            return
        together = xxh3_128("".join(self._found.values()).encode()).hexdigest()
        if len(set(self._group.gather("initial values", together))) == 1:
            return
        held: list[dict[str, Any]] = [{} for _ in range(self._group.count)]
        num_differing = 0
        names = list(self._found)
        for start in range(0, len(names), PART):
            part = names[start : start + PART]
            mine = [self._found[name] for name in part]
            found = self._group.gather("initial values of each array", mine)
            for name, *digests in zip(part, *found, strict=True):
                if len(set(digests)) == 1:
                    continue
                num_differing += 1
                if num_differing <= MOST_NAMED:
                    for one, digest in zip(held, digests, strict=True):
                        one[name] = digest[:8]
        raise ValueError(self._text(held, num_differing))

    def _text(self, held: Sequence[dict[str, Any]], num_differing: int) -> str:
        more = num_differing - MOST_NAMED
        return (
            f"The processes do not begin alike: {num_differing} of {len(self._found)} "
            "initial values differ, and together they would train a mixture. The first "
            f"that differ, each by a digest:\n{differences(held)}\n"
            + (f"  and {more} more\n" if more > 0 else "")
            + "Make them from one seed in every process (jax.random.key(0), not of the "
            "process's index), or read them from the same files. To begin with what "
            "one process saved, call engine.restore before the first batch is given."
        )


def _blocks(array: np.ndarray) -> Sequence[np.ndarray]:
    """The array in blocks of rows that are small enough to copy."""
    if array.flags.c_contiguous or not array.size:
        return [array]
    rows = max(1, BLOCK_BYTES * len(array) // array.nbytes)
    return [array[i : i + rows] for i in range(0, len(array), rows)]
