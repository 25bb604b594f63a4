import subprocess
import sys
from typing import Any
from weakref import WeakSet

import pytest

from zinf.core.memory.host.heap import Heap
from zinf.core.memory.host.pool import IDLE_BYTES, POOL
from zinf.core.memory.ledger import Ledger
from zinf.core.process import malloc
from zinf.core.program import Tier

MIB = 2**20
SLACK = 64 * MIB

# In a process of its own: the heap of the test run is full of others' holes.
HOARDED = """
import os
os.environ["NUMPY_MADVISE_HUGEPAGE"] = "0"
import numpy as np
from zinf.core.process.malloc import anonymous_bytes, tune_malloc
tune_malloc()
from zinf.core.memory.host.heap import Heap

MIB = 2**20

before = anonymous_bytes()
heap = Heap([], slack_bytes=64 * MIB)
arrays = [np.ones(4 * MIB, np.uint8) for _ in range(50)]
pin = arrays.pop()
del arrays
assert anonymous_bytes() - before > 100 * MIB, "nothing was hoarded"
heap.relieve()
assert anonymous_bytes() - before < 64 * MIB
"""


class Process:
    """Says what is in memory, before and after a trim, and counts the trims."""

    def __init__(self) -> None:
        self.trims = 0
        self.given_back: list[int] = []
        self.keeps_large_blocks: bool | None = None
        self.holds(1000 * MIB, 1000 * MIB)

    def holds(self, before: int, after: int) -> None:
        self.now, self.after = before, after

    def trim(self) -> int:
        self.trims += 1
        self.now = self.after
        return self.after

    def keep_large_blocks(self, is_wanted: bool) -> None:
        self.keeps_large_blocks = is_wanted

    def is_trimmed(self, heap: Heap, nbytes: int, *coming: Any) -> bool:
        """Whether `relieve` gives memory back when so much is there beside the own."""
        trims = self.trims
        self.holds(1000 * MIB + nbytes, 1000 * MIB)
        heap.relieve(coming)
        return self.trims == trims + 1


@pytest.fixture
def process(monkeypatch) -> Process:
    process = Process()
    monkeypatch.setattr(malloc, "anonymous_bytes", lambda: process.now)
    monkeypatch.setattr(Heap, "_trim", process.trim)
    monkeypatch.setattr(Heap, "_open", WeakSet())
    monkeypatch.setattr(malloc, "give_back", process.given_back.append)
    monkeypatch.setattr(malloc, "keep_large_blocks", process.keep_large_blocks)
    monkeypatch.setattr(malloc, "is_tuned", lambda: True)
    return process


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc hoards so")
def test_freed_memory_goes_back_to_the_system():
    subprocess.run([sys.executable, "-c", HOARDED], check=True, timeout=60)


def test_freed_memory_may_stay_within_twice_the_peak_or_the_budgets(process):
    ledger, other_ledger = Ledger(Tier.HOST, None), Ledger(Tier.HOST, 150 * MIB)
    heap = Heap([ledger], SLACK)
    ledger.reserve(50 * MIB, "arrays")
    ledger.release(50 * MIB)  # What was counted lately is left alone.
    assert not process.is_trimmed(heap, 100 * MIB + SLACK)
    assert process.is_trimmed(heap, 100 * MIB + SLACK + 1)
    assert process.given_back == [1 + SLACK // 2]
    assert process.keeps_large_blocks is False  # Nothing was counted at the start.
    heap.settle()
    assert process.keeps_large_blocks is True
    ledger.reset_peak()
    assert not process.is_trimmed(heap, 100 * MIB + SLACK)
    ledger.reset_peak()  # The step after that did without.
    assert process.is_trimmed(heap, SLACK + 1)
    # Of another heap too.
    other = Heap([other_ledger], SLACK)
    other_ledger.reserve(60 * MIB, "arrays")
    assert not process.is_trimmed(heap, 120 * MIB + SLACK)
    assert process.is_trimmed(heap, 120 * MIB + SLACK + 1)
    trims = process.trims
    other.close()
    assert process.trims == trims + 1
    assert process.is_trimmed(heap, 120 * MIB + SLACK)
    # Up to the budgets, and what was counted in any case.
    heap.close()
    tight_ledger = Ledger(Tier.HOST, 150 * MIB)
    tight = Heap([tight_ledger], SLACK)
    tight_ledger.reserve(100 * MIB, "arrays")
    assert not process.is_trimmed(tight, 150 * MIB + SLACK)
    assert process.is_trimmed(tight, 150 * MIB + SLACK + 1)
    tight.settle()
    assert process.keeps_large_blocks is False


def test_room_is_made_for_what_is_coming(process):
    heap, found = Heap([Ledger(Tier.HOST, None)], SLACK), SLACK - 10 * MIB
    coming = (Tier.DEVICE, 100 * MIB), (Tier.HOST, 10 * MIB)
    assert not process.is_trimmed(heap, found, *coming)
    assert process.is_trimmed(heap, found, (Tier.HOST, 10 * MIB + 1))


def test_memory_in_use_that_nobody_counted_is_looked_for_once(process):
    heap = Heap([], SLACK)
    trims = process.trims
    process.holds(1500 * MIB, 1400 * MIB)
    for _ in range(10):
        heap.relieve()
    assert process.trims == trims + 1
    # From then on half the slack may be hoarded beside it,
    process.holds(1400 * MIB + SLACK // 2, 1400 * MIB)
    heap.relieve()
    assert process.trims == trims + 1
    process.holds(1400 * MIB + SLACK // 2 + 1, 1400 * MIB)
    heap.relieve()
    assert process.trims == trims + 2
    # until it is gone.
    process.holds(1000 * MIB, 1000 * MIB)
    heap.relieve()
    process.holds(1400 * MIB, 1400 * MIB)
    heap.relieve()
    assert process.trims == trims + 3


def test_what_the_first_step_loads_is_the_own_memory_of_the_process(process):
    ledger = Ledger(Tier.HOST, None)
    heap = Heap([ledger], SLACK)
    ledger.reserve(300 * MIB, "arrays")
    process.holds(1400 * MIB, 1400 * MIB)
    heap.settle()
    process.holds(1400 * MIB + SLACK, 0)
    trims = process.trims
    heap.relieve()
    assert process.trims == trims
    process.holds(2000 * MIB, 1400 * MIB)
    for _ in range(10):
        heap.settle()
    assert process.trims == trims + 1, "it is measured before the first two steps"


def test_without_leave_malloc_is_neither_set_nor_trimmed(process, monkeypatch):
    def touch(*_: object) -> None:
        raise AssertionError("malloc was touched")

    for name in ("keep_large_blocks", "give_back", "trim"):
        monkeypatch.setattr(malloc, name, touch)
    monkeypatch.setattr(malloc, "is_tuned", lambda: False)
    ledger = Ledger(Tier.HOST, None)
    heap = Heap([ledger], SLACK)
    ledger.reserve(2 * IDLE_BYTES, "arrays")
    process.holds(2**60, 0)
    heap.relieve()
    # The pool may keep what the ledgers counted in any case.
    assert POOL.idle_limit_bytes == 2 * IDLE_BYTES
    heap.settle()
    POOL.take(2**21)
    heap.close()
    assert (POOL.idle_bytes, POOL.idle_limit_bytes) == (0, IDLE_BYTES)
    assert process.trims == 0
