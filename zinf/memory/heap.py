"""Keeps the memory of this process near what the ledgers count.

A ledger counts arrays; the system counts pages, and glibc gives freed memory back
reluctantly: each thread has a heap of its own, freed blocks of up to 32 MiB stay in it,
and the heaps of all links, of XLA and of TensorStore peak at different times. Training
350M parameters within 1 GiB of budgets took 3.3 GiB so. Blocks that malloc maps one by
one (M_MMAP_THRESHOLD) are given back at once, but each is faulted in anew: half as much
system time again. So there is one heap where that can still be chosen, and what is
hoarded beyond a limit is trimmed. The limit goes by what was counted at most: memory
that a step needs at one time is memory that it may keep for itself at another, and
giving it back in between only costs faults (a fifth of a step of 91M parameters).
"""

import ctypes
import os
import platform
from collections.abc import Iterable, Sequence
from threading import Lock

from zinf.memory.ledger import Ledger
from zinf.memory.pool import IDLE_BYTES, POOL
from zinf.program import Tier

# What may be resident beyond the most that was counted: what libraries work in.
SLACK_BYTES = 96 * 2**20
# When it is made, and before the first two steps.
NUM_SETTLED = 3

M_ARENA_MAX = -8  # of <malloc.h>
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def share_heap() -> None:
    """Make threads that start from now on share one heap, where malloc is glibc's.

    It has no effect on threads that allocated before, so call it before jax starts
    any: before the first array is made.
    """
    if _is_glibc():
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


class Heap:
    """The memory of this process beside the bytes of `ledgers`.

    What is resident beside them when it is made, and after the first step, is taken for
    the process's own: the interpreter, jax, compiled programs, what libraries load when
    they are first used. Safe to call from several threads.
    """

    def __init__(
        self, ledgers: Sequence[Ledger], slack_bytes: int = SLACK_BYTES
    ) -> None:
        self._ledgers = ledgers
        self._slack_bytes = slack_bytes
        self._is_glibc = _is_glibc()
        self._lock = Lock()
        self._own_bytes = 0
        self._num_settled = 0
        self.settle()
        # What was in use, counted or not, when memory was last looked for in vain.
        self._in_use_bytes = 0

    def settle(self) -> None:
        """Measure the process's own memory anew; for when no step is under way.

        After the first step nothing new is loaded, so it is not measured any more.
        """
        if self._is_glibc and self._num_settled < NUM_SETTLED:
            self._num_settled += 1
            used = sum(ledger.used_bytes for ledger in self._ledgers)
            self._own_bytes = max(self._own_bytes, self._trim() - used)

    def relieve(self, coming: Iterable[tuple[Tier, int]] = ()) -> None:
        """Give freed memory back to the system, if more is resident than is needed.

        That is what the ledgers counted at most in this step and the last one. Cheap
        enough (20 us) for each time that an array is freed.

        Args:
            coming: bytes on each tier that are about to be used, in new memory for all
                that is known here.
        """
        counted = sum(ledger.recent_peak_bytes for ledger in self._ledgers)
        POOL.idle_limit_bytes = max(IDLE_BYTES, counted)
        if not self._is_glibc:
            return
        new_bytes = [n for x in self._ledgers for tier, n in coming if tier == x.tier]
        resident = resident_bytes()
        limit = self._own_bytes + counted + self._slack_bytes - sum(new_bytes)
        if resident <= limit:
            self._in_use_bytes = 0
            return
        # What was in use the last time is not looked for again at each free.
        if resident <= self._in_use_bytes + self._slack_bytes // 2:
            return
        if self._lock.acquire(blocking=False):
            try:
                # Huge pages of the pool are the cheapest to have again.
                POOL.trim(resident - limit)
                if resident_bytes() > limit:
                    self._in_use_bytes = self._trim()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Let no more lie idle than without an engine."""
        POOL.idle_limit_bytes = IDLE_BYTES
        POOL.trim()

    def _trim(self) -> int:
        POOL.trim()
        ctypes.CDLL(None).malloc_trim(0)
        return resident_bytes()


def resident_bytes() -> int:
    """What of this process is in memory now (Linux: proc(5), statm)."""
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
