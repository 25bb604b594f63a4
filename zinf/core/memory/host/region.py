"""A range of addresses that blocks of any size are cut from.

A new region takes only addresses. A page is in memory from its first use until `trim`
gives it back, whichever block uses it. So small blocks reuse the pages of a large block
that was freed, and a large block reuses those of small ones.
"""

import mmap
import sys
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path

import numpy as np

HUGE_PAGE_BYTES = 2 * 2**20
# Blocks begin at multiples of a unit. Several blocks may share a huge page.
UNIT_BYTES = 64 * 2**10
UNITS = HUGE_PAGE_BYTES // UNIT_BYTES
# With this flag Linux does not count addresses as memory (mmap(2), proc(5)), unless it
# is set never to promise more memory than it has.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
OVERCOMMIT, NEVER = Path("/proc/sys/vm/overcommit_memory"), 2


class Region:
    """A range of addresses, its blocks in use and its pages in memory.

    Not safe to call from several threads.

    Attributes:
        memory: the whole range; only blocks that `take` gave out may be touched.
        address, nbytes: the huge pages that blocks are cut from.
        idle_pages: number of huge pages that are in memory and not in use.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError if the system has no such range of addresses."""
        num_pages = -(-nbytes // HUGE_PAGE_BYTES)
        # One page more, so that the first block can begin at a huge page.
        self.memory = _map((1 + num_pages) * HUGE_PAGE_BYTES)
        found = np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0]
        self._offset = -found % HUGE_PAGE_BYTES
        self.address, self.nbytes = found + self._offset, num_pages * HUGE_PAGE_BYTES
        # Free ranges as (first unit, unit after the last), in order, never adjacent.
        self._free = [(0, num_pages * UNITS)]
        self._units_in_use = np.zeros(num_pages, np.int8)
        self._is_touched = np.zeros(num_pages, bool)
        self.idle_pages = 0

    def take(self, nbytes: int) -> int | None:
        """Take a block; returns its offset in `memory`, or None if no range fits it.

        It goes where the fewest pages are new; among equals, into the smallest range.
        """
        size, best = _units(nbytes), None
        for number, (start, stop) in enumerate(self._free):
            if stop - start < size:
                continue
            for first in {start, stop - size}:
                cost = self._num_new(first, first + size), stop - start, first
                if best is None or cost < best[0]:
                    best = cost, number
        if best is None:
            return None
        (_, _, first), number = best
        start, stop = self._free[number]
        rest = [(start, first), (first + size, stop)]
        self._free[number : number + 1] = [(a, b) for a, b in rest if a < b]
        self._use(first, first + size, 1)
        return self._offset + first * UNIT_BYTES

    def give_back(self, offset: int, nbytes: int) -> None:
        """Frees a block that `take` gave out; its pages stay in memory."""
        start = (offset - self._offset) // UNIT_BYTES
        stop = start + _units(nbytes)
        number = bisect_left(self._free, (start, stop))
        around = self._free[max(number - 1, 0) : number + 1]
        assert all(b <= start or a >= stop for a, b in around), "it is free already"
        before = number > 0 and self._free[number - 1][1] == start
        after = number < len(self._free) and self._free[number][0] == stop
        merged = (
            self._free[number - 1][0] if before else start,
            self._free[number][1] if after else stop,
        )
        self._free[number - before : number + after] = [merged]
        self._use(start, stop, -1)

    @property
    def is_empty(self) -> bool:
        """Whether no block is in use and no page is in memory."""
        return not self._is_touched.any()

    def trim(self, num_pages: int) -> None:
        """Gives idle pages back to the system, those at the highest addresses first.

        Systems other than Linux give pages back only with their addresses: there all
        pages go at once when none is in use, and the pool then drops the region.
        """
        idle = np.flatnonzero(self._is_touched & (self._units_in_use == 0))
        if sys.platform == "linux":
            gone = idle[max(len(idle) - num_pages, 0) :]
        else:
            gone = idle if not self._units_in_use.any() else idle[:0]
        self._is_touched[gone] = False
        self.idle_pages -= len(gone)
        for run in np.split(gone, np.flatnonzero(np.diff(gone) > 1) + 1):
            if len(run):
                start = self._offset + int(run[0]) * HUGE_PAGE_BYTES
                nbytes = len(run) * HUGE_PAGE_BYTES
                _forget(self.memory, start, nbytes)

    def _num_new(self, start: int, stop: int) -> int:
        pages = self._is_touched[start // UNITS : -(-stop // UNITS)]
        return len(pages) - int(np.count_nonzero(pages))

    def _use(self, start: int, stop: int, sign: int) -> None:
        first, last = start // UNITS, -(-stop // UNITS)
        pages = slice(first, last)
        idle = self._num_idle(pages)
        counts = np.full(last - first, UNITS, np.int8)
        counts[0] -= start - first * UNITS
        counts[-1] -= last * UNITS - stop
        self._units_in_use[pages] += sign * counts
        self._is_touched[pages] = True
        self.idle_pages += self._num_idle(pages) - idle

    def _num_idle(self, pages: slice) -> int:
        is_free = self._units_in_use[pages] == 0
        return int(np.count_nonzero(is_free & self._is_touched[pages]))


def _map(nbytes: int) -> mmap.mmap:
    """A range of addresses; each page gets memory at its first use."""
    if sys.platform == "win32":
        memory = mmap.mmap(-1, nbytes)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, nbytes, flags=flags)
    if sys.platform == "linux":
        # A kernel without huge pages refuses this; then small pages are used.
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _forget(memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Gives pages back to the system; their content is lost."""
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_DONTNEED, start, nbytes)


def are_addresses_counted() -> bool:
    """Whether the system counts reserved addresses as memory in use."""
    try:
        return not MAP_NORESERVE or int(OVERCOMMIT.read_text()) == NEVER
    except OSError:
        return False  # a sandbox that hides it


def _units(nbytes: int) -> int:
    return -(-nbytes // UNIT_BYTES)
