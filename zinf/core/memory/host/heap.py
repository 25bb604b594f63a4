"""Keeps the memory of this process near the bytes that the ledgers count.

A ledger counts arrays; the system counts pages. The pool may keep idle pages up to the
recent peak of the ledgers. Where malloc is tuned (`zinf.tune_malloc`), malloc may keep
freed memory too. Then free memory of both is given back only as far as the process
exceeds a limit. The limit follows the recent peak, not the bytes held now: a step may
keep at all times the memory that it needs at its peak.
"""

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import ClassVar
from weakref import WeakSet

from zinf.core.memory.host.pool import IDLE_BYTES, POOL
from zinf.core.memory.ledger import Ledger
from zinf.core.process import malloc
from zinf.core.program import Tier

# Bytes allowed in memory beyond the counted peak: working memory of libraries, and free
# holes in malloc's memory. Pages of more holes are given back and faulted in again.
SLACK_BYTES = 224 * 2**20
# The process's own memory is measured at the start and before the first two steps.
NUM_SETTLED = 3


class Heap:
    """The memory of this process, compared with the bytes that `ledgers` count.

    Where malloc is tuned, memory that no ledger counts when the heap is made, and after
    the first step, is taken for the process's own: the interpreter, jax, compiled
    programs, and what libraries load at their first use. With several heaps in one
    process, each counts the ledgers of all. Safe to call from several threads.
    """

    _open: "ClassVar[WeakSet[Heap]]" = WeakSet()
    _registering: ClassVar[Lock] = Lock()
    _trimming: ClassVar[Lock] = Lock()

    def __init__(
        self, ledgers: Sequence[Ledger], slack_bytes: int = SLACK_BYTES
    ) -> None:
        self._ledgers = ledgers
        self._slack_bytes = slack_bytes
        self._is_tuned = malloc.is_tuned()
        self._own_bytes = 0
        with self._registering:
            self._open.add(self)
        self._num_settled = 0
        self.settle()
        # Bytes still in memory after the last trim; 0 once below the limit again.
        self._in_use_bytes = 0

    def settle(self) -> None:
        """Measure the process's own memory again; call this while no step runs.

        After the first step nothing new is loaded, so later calls do not measure. Each
        call lets malloc keep large blocks if the budgets allow twice the counted peak.
        """
        if not self._is_tuned:
            return
        # The counted peak includes a step only after the first one.
        counted, kept = self._counted()
        malloc.keep_large_blocks(0 < 2 * counted <= kept)
        if self._num_settled < NUM_SETTLED:
            self._num_settled += 1
            used = sum(ledger.used_bytes for ledger in self._all_ledgers())
            self._own_bytes = max(self._own_bytes, self._trim() - used)

    def rest(self) -> None:
        """Give all idle memory back, where what comes next needs other memory."""
        if self._is_tuned:
            self._trim()
        else:
            POOL.trim()

    def relieve(self, coming: Iterable[tuple[Tier, int]] = ()) -> None:
        """Let the pool keep what steps need; give back what a tuned malloc hoards.

        Steps need the peak that the ledgers counted in this step and the last one. As
        much again is allowed if the budgets have it, for holes that no block fits into.
        A call takes 20 us, cheap enough for each time that an array is freed.

        Args:
            coming: bytes on each tier that will be used next. They are assumed to need
                new memory.
        """
        counted, kept = self._counted()
        POOL.idle_limit_bytes = max(IDLE_BYTES, counted)
        if not self._is_tuned:
            return
        new_bytes = [n for x in self._ledgers for tier, n in coming if tier == x.tier]
        limit = self._own_bytes + kept + self._slack_bytes - sum(new_bytes)
        found = malloc.anonymous_bytes()
        if found <= limit:
            self._in_use_bytes = 0
            return
        # The last trim found about this much in use: do not trim again at each free.
        if found <= self._in_use_bytes + self._slack_bytes // 2:
            return
        if self._trimming.acquire(blocking=False):
            try:
                # The pool first: its huge pages are the cheapest to fault in again.
                POOL.trim(found - limit)
                surplus = malloc.anonymous_bytes() - limit
                if surplus > 0:
                    self._in_use_bytes = self._give_back(
                        surplus + self._slack_bytes // 2, limit
                    )
            finally:
                self._trimming.release()

    def close(self) -> None:
        """Give idle memory back, and limit the pool as before there was an engine."""
        with self._registering:
            self._open.discard(self)
        POOL.idle_limit_bytes = IDLE_BYTES
        self.rest()

    def _counted(self) -> tuple[int, int]:
        """The ledgers' recent peak in bytes, and the bytes allowed in memory for it."""
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
        """Gives back `nbytes`, or all free memory if `limit` is still exceeded.

        Returns the bytes then in memory.
        """
        malloc.give_back(nbytes)
        found = malloc.anonymous_bytes()
        return found if found <= limit else self._trim()

    def _trim(self) -> int:
        POOL.trim()
        malloc.trim()
        return malloc.anonymous_bytes()
