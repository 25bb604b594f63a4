"""Keeps the memory of this process near what the ledgers count.

A ledger counts arrays; the system counts pages. The pool may keep idle pages up to the
most that was counted. Where malloc may be tuned (`zinf.tune_malloc`), so may the heap,
and what lies free in both beyond a limit is given back, no more than that. The limit
goes by what was counted at most: memory that a step needs at one time is memory that it
may keep for itself at another.
"""

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import ClassVar
from weakref import WeakSet

from zinf import malloc
from zinf.memory.ledger import Ledger
from zinf.memory.pool import IDLE_BYTES, POOL
from zinf.program import Tier

# What may be in memory beyond the most that was counted: what libraries work in, and
# holes, of which pages are given back and faulted in anew where there are more.
SLACK_BYTES = 224 * 2**20
# When it is made, and before the first two steps.
NUM_SETTLED = 3


class Heap:
    """The memory of this process beside the bytes of `ledgers`.

    Where malloc is tuned, what is in memory beside them when the heap is made, and
    after the first step, is taken for the process's own: the interpreter, jax, compiled
    programs, what libraries load when they are first used. All heaps of a process are
    one: what the ledgers of others count is theirs. Safe to call from several threads.
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
        # What was in use, counted or not, when memory was last looked for in vain.
        self._in_use_bytes = 0

    def settle(self) -> None:
        """Measure the process's own memory anew; for when no step is under way.

        After the first step nothing new is loaded, so it is not measured any more.
        Large blocks are kept from then on, if budgets allow twice what was counted.
        """
        if not self._is_tuned:
            return
        # What a step takes is known once there was one.
        counted, kept = self._counted()
        malloc.keep_large_blocks(0 < 2 * counted <= kept)
        if self._num_settled < NUM_SETTLED:
            self._num_settled += 1
            used = sum(ledger.used_bytes for ledger in self._all_ledgers())
            self._own_bytes = max(self._own_bytes, self._trim() - used)

    def relieve(self, coming: Iterable[tuple[Tier, int]] = ()) -> None:
        """Let the pool keep what steps need; give back what a tuned malloc hoards.

        Needed is what the ledgers counted at most in this step and the last one, and as
        much again where the budgets allow it, for holes that nothing fits into. Cheap
        enough (20 us) for each time that an array is freed.

        Args:
            coming: bytes on each tier that are about to be used, in new memory for all
                that is known here.
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
        # What was in use the last time is not looked for again at each free.
        if found <= self._in_use_bytes + self._slack_bytes // 2:
            return
        if self._trimming.acquire(blocking=False):
            try:
                # Huge pages of the pool are the cheapest to have again.
                POOL.trim(found - limit)
                surplus = malloc.anonymous_bytes() - limit
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
        if self._is_tuned:
            self._trim()
        else:
            POOL.trim()

    def _counted(self) -> tuple[int, int]:
        """Bytes counted at most lately, and how many may be in memory for them."""
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
        malloc.give_back(nbytes)
        found = malloc.anonymous_bytes()
        return found if found <= limit else self._trim()

    def _trim(self) -> int:
        POOL.trim()
        malloc.trim()
        return malloc.anonymous_bytes()
