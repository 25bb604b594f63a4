"""Keeps the memory of this process near what the ledgers count.

A ledger counts arrays; the system counts pages, and glibc gives freed memory back
reluctantly: each thread has a heap of its own, freed blocks of up to 32 MiB stay in it,
and the heaps of all links, of XLA and of TensorStore peak at different times. Training
350M parameters within 1 GiB of budgets took 3.3 GiB so. Larger blocks malloc maps one
by one and gives back at once, but each is faulted in anew: a fifth of a step of 124M
parameters in memory. So there is one heap where that can still be chosen; where budgets
leave room it keeps blocks of every size; and what is hoarded beyond a limit is given
back, no more than that. The limit goes by what was counted at most: memory that a step
needs at one time is memory that it may keep for itself at another.

Code of libraries that only compiling needed is taken out of what is resident as well
(`code`).
"""

import ctypes
import mmap
import platform
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import ClassVar
from weakref import WeakSet

from zinf.memory.code import MADV_DONTNEED, drop_code
from zinf.memory.ledger import Ledger
from zinf.memory.pool import IDLE_BYTES, POOL
from zinf.program import Tier

# What may be resident beyond the most that was counted: what libraries work in, and
# holes, of which pages are given back and faulted in anew where there are more.
SLACK_BYTES = 224 * 2**20
# What steps touch of libraries stays; more than this was touched by a compiler.
CODE_BYTES = 64 * 2**20
# When it is made, and before the first two steps.
NUM_SETTLED = 3

# Of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
MANY = 65536
# Where memory is short, blocks from this size are mapped one by one: kept, they are
# what is given back and then faulted in anew.
LARGE_BYTES = 32 * 2**20
PAGE_BYTES = mmap.PAGESIZE
# Free memory is given back in pieces of this size.
PIECE_BYTES = 8 * 2**20


def share_heap() -> None:
    """Make threads that start from now on share one heap, where malloc is glibc's.

    What is freed there stays until a `Heap` gives it back. Threads that allocated
    before go on with heaps of their own, so call it before jax starts any: before the
    first array is made.
    """
    if _is_glibc():
        libc = ctypes.CDLL(None)
        for parameter, setting in (
            (M_ARENA_MAX, 1),
            (M_TRIM_THRESHOLD, -1),  # never
            (M_MMAP_THRESHOLD, LARGE_BYTES),
        ):
            libc.mallopt(parameter, setting)


class Heap:
    """The memory of this process beside the bytes of `ledgers`.

    What is resident beside them when it is made, and after the first step, is taken for
    the process's own: the interpreter, jax, compiled programs, what libraries load when
    they are first used. All heaps of a process are one: what the ledgers of others
    count is theirs. Safe to call from several threads.
    """

    _open: "ClassVar[WeakSet[Heap]]" = WeakSet()
    _registering: ClassVar[Lock] = Lock()
    _trimming: ClassVar[Lock] = Lock()
    _code_bytes: ClassVar[int] = 0  # what was left of it when it was last dropped

    def __init__(
        self, ledgers: Sequence[Ledger], slack_bytes: int = SLACK_BYTES
    ) -> None:
        self._ledgers = ledgers
        self._slack_bytes = slack_bytes
        self._is_glibc = _is_glibc()
        self._own_bytes = 0
        with self._registering:
            self._open.add(self)
        self._num_settled = 0
        self.settle()
        # What was in use, counted or not, when memory was last looked for in vain.
        self._in_use_bytes = 0

    def settle(self) -> None:
        """Measure the process's own memory anew; for when no step is under way.

        After the first step nothing new is loaded, so it is not measured any more.
        Large blocks are kept from then on, if budgets allow twice what was counted.
        """
        if not self._is_glibc:
            return
        # What a step takes is known once there was one.
        counted, kept = self._counted()
        has_room = 0 < 2 * counted <= kept
        ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0 if has_room else MANY)
        if self._num_settled < NUM_SETTLED:
            self._num_settled += 1
            self._drop_code(code_bytes())
            used = sum(ledger.used_bytes for ledger in self._all_ledgers())
            self._own_bytes = max(self._own_bytes, self._trim() - used)

    def relieve(self, coming: Iterable[tuple[Tier, int]] = ()) -> None:
        """Give freed memory back to the system, if more is resident than is needed.

        That is what the ledgers counted at most in this step and the last one, and as
        much again where the budgets allow it, for holes that nothing fits into. Cheap
        enough (20 us) for each time that an array is freed.

        Args:
            coming: bytes on each tier that are about to be used, in new memory for all
                that is known here.
        """
        counted, kept = self._counted()
        POOL.idle_limit_bytes = max(IDLE_BYTES, counted)
        if not self._is_glibc:
            return
        resident, code = measured()
        self._drop_code(code)
        new_bytes = [n for x in self._ledgers for tier, n in coming if tier == x.tier]
        limit = self._own_bytes + kept + self._slack_bytes - sum(new_bytes)
        if resident <= limit:
            self._in_use_bytes = 0
            return
        # What was in use the last time is not looked for again at each free.
        if resident <= self._in_use_bytes + self._slack_bytes // 2:
            return
        if self._trimming.acquire(blocking=False):
            try:
                # Huge pages of the pool are the cheapest to have again.
                POOL.trim(resident - limit)
                surplus = resident_bytes() - limit
                if surplus > 0:
                    self._in_use_bytes = self._give_back(
                        surplus + self._slack_bytes // 2, limit
                    )
            finally:
                self._trimming.release()

    def close(self) -> None:
        """Let no more lie idle than without an engine."""
        with self._registering:
            self._open.discard(self)
        POOL.idle_limit_bytes = IDLE_BYTES
        if self._is_glibc:
            self._trim()
        else:
            POOL.trim()

    def _drop_code(self, code: int) -> None:
        """Once more of it was touched than steps do; it takes 50 ms."""
        if code > Heap._code_bytes + CODE_BYTES:
            drop_code()
            Heap._code_bytes = code_bytes()

    def _counted(self) -> tuple[int, int]:
        """Bytes counted at most lately, and how many may be resident for them."""
        ledgers = self._all_ledgers()
        counted = sum(ledger.recent_peak_bytes for ledger in ledgers)
        if any(ledger.capacity_bytes is None for ledger in ledgers):
            return counted, 2 * counted
        allowed = sum(ledger.capacity_bytes or 0 for ledger in ledgers)
        return counted, max(counted, min(2 * counted, allowed))

    def _all_ledgers(self) -> list[Ledger]:
        with self._registering:
            return [ledger for heap in self._open for ledger in heap._ledgers]

    def _give_back(self, nbytes: int, limit: int) -> int:
        """Gives back so much if it can, and all if not even the limit is kept."""
        give_back(nbytes)
        resident = resident_bytes()
        return resident if resident <= limit else self._trim()

    def _trim(self) -> int:
        POOL.trim()
        ctypes.CDLL(None).malloc_trim(0)
        return resident_bytes()


def give_back(nbytes: int) -> None:
    """Give about so many bytes of free memory back to the system, where malloc is
    glibc's: `malloc_trim` knows only all, which is then faulted in anew.

    Takes pieces of the heap, drops their pages and frees them. A piece may be memory
    that the system has back already; when the heap has no other, it stops.
    """
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    pieces, wanted, end = [], resident_bytes() - nbytes, libc.sbrk(0)
    while True:
        piece = ctypes.c_void_p()
        if libc.posix_memalign(ctypes.byref(piece), PAGE_BYTES, PIECE_BYTES):
            break
        pieces.append(piece)
        if (piece.value or 0) + PIECE_BYTES > end:
            break
        libc.madvise(piece, ctypes.c_size_t(PIECE_BYTES), MADV_DONTNEED)
        if resident_bytes() <= wanted:
            break
    for piece in pieces:
        libc.free(piece)


def resident_bytes() -> int:
    """What of this process is in memory now, beside pages of files."""
    return measured()[0]


def code_bytes() -> int:
    """What is in memory now of files that this process maps, libraries for the most."""
    return measured()[1]


def measured() -> tuple[int, int]:
    """`resident_bytes` and `code_bytes`, read at once (Linux: proc(5))."""
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        _, resident, files, *_ = map(int, statm.read().split())
    return (resident - files) * PAGE_BYTES, files * PAGE_BYTES


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
