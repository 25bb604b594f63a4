"""Large blocks of host memory on huge pages, given out again instead of freed.

A first touch of fresh memory costs more than a drive takes to fill it: reading into new
pages ran at 1.3 GB/s and a second of processor time per GB, into pages touched before
at 3.2 GB/s and 0.02 seconds. Drives also read and write huge pages faster than small
ones (3.3 against 2.8 GB/s, 7.5 against 6.0), since a request of 4 MiB is then a few
runs of physical memory and not a thousand.
"""

import weakref
from collections import deque
from threading import Lock

import numpy as np

from zinf.memory.physical import physical_bytes
from zinf.memory.region import HUGE_PAGE_BYTES, Region, are_addresses_counted

# What lies idle for the next request at most.
IDLE_BYTES = 256 * 2**20


class PooledMemory(np.ndarray):
    """The bytes of one block, uint8; goes back to its pool when nothing refers to it.

    Views made of it keep it alive, so it goes back exactly when the last of them does.
    """


class Pool:
    """Hands out blocks of memory, and takes back what is no longer referred to.

    Safe to call from several threads. `idle_limit_bytes` bounds what is kept for later,
    in whole huge pages; what is in use is bounded by who asks.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self.idle_limit_bytes = idle_bytes
        self._lock = Lock()
        self._regions: list[Region] = []
        # Blocks come back while the garbage collector runs, perhaps in a thread that
        # holds the lock: a deque takes them without one.
        self._returned: deque[tuple[Region, int, int]] = deque()

    def take(self, nbytes: int) -> PooledMemory:
        """`nbytes` of memory with undefined content, at a boundary of 64 KiB."""
        assert nbytes > 0
        with self._lock:
            self._collect()
            region, offset = self._place(nbytes)
        # Over the region itself, not a view of an array: NumPy would make that array
        # the base of every view of this one, and forget this one.
        memory = PooledMemory((nbytes,), np.uint8, buffer=region.memory, offset=offset)
        returns = weakref.finalize(memory, self._take_back, region, offset, nbytes)
        returns.atexit = False  # pyrefly: ignore
        return memory

    def trim(self, nbytes: int | None = None) -> None:
        """Give idle memory back to the system: all, or about `nbytes` of it."""
        with self._lock:
            self._collect()
            self._drop_to(0 if nbytes is None else self._idle_bytes - nbytes)

    @property
    def idle_bytes(self) -> int:
        """What is kept for later now, in huge pages that nothing uses any part of."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    @property
    def _idle_bytes(self) -> int:
        return sum(r.idle_pages for r in self._regions) * HUGE_PAGE_BYTES

    def _take_back(self, region: Region, offset: int, nbytes: int) -> None:
        self._returned.append((region, offset, nbytes))
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Make what came back idle, and give back what is beyond the limit."""
        while self._returned:
            region, offset, nbytes = self._returned.popleft()
            region.give_back(offset, nbytes)
        self._drop_to(self.idle_limit_bytes)

    def _drop_to(self, nbytes: int) -> None:
        for region in reversed(self._regions):
            surplus = self._idle_bytes - nbytes
            if surplus <= 0:
                return
            region.trim(-(-surplus // HUGE_PAGE_BYTES))
            if region.is_empty:
                self._regions.remove(region)

    def _place(self, nbytes: int) -> tuple[Region, int]:
        for region in self._regions:
            offset = region.take(nbytes)
            if offset is not None:
                return region, offset
        region = _reserve(nbytes)
        self._regions.append(region)
        offset = region.take(nbytes)
        assert offset is not None
        return region, offset


def _reserve(nbytes: int) -> Region:
    """As many addresses as there is memory, so that one range does for all blocks.

    If addresses are short, what can be had of them; `nbytes` where they are counted as
    memory, and would be missing elsewhere.
    """
    wished = physical_bytes()
    if are_addresses_counted():
        wished = nbytes
    while wished > nbytes:
        try:
            return Region(wished)
        except OSError:
            wished //= 2
    return Region(nbytes)


POOL = Pool()
