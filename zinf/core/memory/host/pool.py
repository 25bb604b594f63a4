"""Large blocks of host memory on huge pages, reused instead of freed.

The first touch of a new page costs more time than a drive takes to fill it. Reads ran
at 1.3 GB/s into new pages, with 1 second of processor time per GB, and at 3.2 GB/s into
pages touched before, with 0.02 seconds. Huge pages also move faster than small ones
(reads 3.3 against 2.8 GB/s, writes 7.5 against 6.0), because a request of 4 MiB is then
a few runs of physical memory instead of a thousand.
"""

import weakref
from collections import deque
from threading import Lock

import numpy as np

from zinf.core.memory.host.region import HUGE_PAGE_BYTES, Region, are_addresses_counted
from zinf.core.memory.physical import physical_bytes

# Upper bound on idle bytes kept for reuse.
IDLE_BYTES = 256 * 2**20


class PooledMemory(np.ndarray):
    """The bytes of one block, as uint8.

    A view of the block keeps the block alive. The block returns to its pool when
    neither the block nor a view of it is referred to any more.
    """


class Pool:
    """Hands out blocks of memory, and takes back blocks that nothing refers to.

    Safe to call from several threads. `idle_limit_bytes` bounds the idle memory kept
    for reuse, in whole huge pages. The pool does not bound the memory in use.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self.idle_limit_bytes = idle_bytes
        self._lock = Lock()
        self._regions: list[Region] = []
        # The garbage collector may return a block in a thread that already holds the
        # lock. Appending to a deque needs no lock.
        self._returned: deque[tuple[Region, int, int]] = deque()

    def take(self, nbytes: int) -> PooledMemory:
        """A block of `nbytes`, aligned to 64 KiB; its content is undefined."""
        assert nbytes > 0
        with self._lock:
            self._collect()
            region, offset = self._place(nbytes)
        # The buffer is the region's memory, not an array over it: NumPy would make that
        # array the base of every view, and views would not keep this block alive.
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
        """Bytes kept for reuse: huge pages of which no part is in use."""
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
        """Mark returned blocks as idle; give idle pages beyond the limit back."""
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
    """A region with as many addresses as the machine has memory, for all blocks.

    If the system refuses so many, half as many are tried, down to `nbytes`. Where the
    system counts addresses as memory, the region has only `nbytes`, because other
    programs would lack the rest.
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
