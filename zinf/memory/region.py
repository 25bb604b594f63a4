"""A range of addresses that blocks of any size are cut from, page by page in memory.

Only addresses are taken at first. A page is in memory from its first use until it is
given back, whoever uses it: what a large block leaves behind is used again by small
ones, and the other way round.
"""

import mmap
import sys
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path

import numpy as np

HUGE_PAGE_BYTES = 2 * 2**20
# Blocks begin at a multiple of it. Several may share a huge page.
UNIT_BYTES = 64 * 2**10
UNITS = HUGE_PAGE_BYTES // UNIT_BYTES
# Addresses alone are not counted as memory (Linux: mmap(2), proc(5)), unless the system
# promises no more memory than it has.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
OVERCOMMIT, NEVER = Path("/proc/sys/vm/overcommit_memory"), 2


class Region:
    """Not safe to call from several threads.

    Attributes:
        memory: of which only what `take` gave out may be touched.
        idle_pages: huge pages that are in memory and not in use.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError if the system has no such range of addresses."""
        num_pages = -(-nbytes // HUGE_PAGE_BYTES)
        # One page more, to begin at a huge one.
        self.memory = _map((1 + num_pages) * HUGE_PAGE_BYTES)
        found = np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0]
        self._offset = -found % HUGE_PAGE_BYTES
        # First and last unit of what is free, in order and never side by side.
        self._free = [(0, num_pages * UNITS)]
        self._units_in_use = np.zeros(num_pages, np.int8)
        self._is_touched = np.zeros(num_pages, bool)
        self.idle_pages = 0

    def take(self, nbytes: int) -> int | None:
        """Where a block begins in `memory`; None if there are not as many addresses.

        It is where the fewest pages are new; of such, where the smallest room is.
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
        """Makes what `take` gave free again; its pages stay in memory."""
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
        """Whether nothing is in use, and nothing in memory."""
        return not self._is_touched.any()

    def trim(self, num_pages: int) -> None:
        """Lets so many idle pages go, those of the highest addresses.

        On systems other than Linux only all pages at once, when none is in use: they go
        with the addresses, which the pool then lets go of.
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
    """Addresses; memory comes with the first use of a page."""
    if sys.platform == "win32":
        memory = mmap.mmap(-1, nbytes)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, nbytes, flags=flags)
    if sys.platform == "linux":
        # A kernel without huge pages: everything works, on small ones.
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _forget(memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Gives pages back; what is in them is lost."""
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_DONTNEED, start, nbytes)


def are_addresses_counted() -> bool:
    """Whether a range of addresses takes from the memory that others may have."""
    try:
        return not MAP_NORESERVE or int(OVERCOMMIT.read_text()) == NEVER
    except OSError:
        return False  # a sandbox that hides it


def _units(nbytes: int) -> int:
    return -(-nbytes // UNIT_BYTES)
