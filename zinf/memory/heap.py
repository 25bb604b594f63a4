"""Keeps the memory of this process near what the ledgers count.

A ledger counts arrays; the system counts pages, and glibc gives freed memory back
reluctantly: each thread has a heap of its own, freed blocks of up to 32 MiB stay in it,
and the heaps of all links, of XLA and of TensorStore peak at different times. Training
350M parameters within 1 GiB of budgets took 3.3 GiB so. Blocks that malloc maps one by
one (M_MMAP_THRESHOLD) are given back at once, but each is faulted in anew: half as much
system time again. So there is one heap where that can still be chosen, and what is
hoarded beyond a limit is trimmed.
"""

import ctypes
import os
import platform
from collections.abc import Sequence
from threading import Lock

from zinf.memory.ledger import Ledger
from zinf.memory.pool import POOL

# What may be resident beyond the counted bytes: what is on its way through TensorStore,
# and freed memory that is about to be used again.
SLACK_BYTES = 384 * 2**20

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

    What is resident when it is made (the interpreter, jax, compiled programs) is taken
    for the process's own. Safe to call from several threads.
    """

    def __init__(
        self, ledgers: Sequence[Ledger], slack_bytes: int = SLACK_BYTES
    ) -> None:
        self._ledgers = ledgers
        self._slack_bytes = slack_bytes
        self._is_glibc = _is_glibc()
        self._lock = Lock()
        self._own_bytes = self._trim() if self._is_glibc else 0

    def relieve(self) -> None:
        """Give freed memory back to the system, if much more is resident than counted.

        Cheap enough (20 us) for each time that an array is freed.
        """
        if not self._is_glibc or self._excess_bytes(resident_bytes()) <= 0:
            return
        if self._lock.acquire(blocking=False):
            try:
                excess_bytes = self._excess_bytes(self._trim())
                # What is left is in use. Do not look for it again at the next free.
                self._own_bytes += max(0, excess_bytes + self._slack_bytes // 2)
            finally:
                self._lock.release()

    def _excess_bytes(self, resident: int) -> int:
        counted = sum(ledger.used_bytes for ledger in self._ledgers)
        return resident - counted - self._own_bytes - self._slack_bytes

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
