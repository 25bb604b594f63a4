"""A block has one owner at a time, and comes back when nobody can see it any more."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import jax
import numpy as np
import pytest

from zinf.malloc import anonymous_bytes
from zinf.memory.aligned import POOLED_FROM_BYTES, address, aligned_empty
from zinf.memory.pool import POOL, Pool
from zinf.memory.region import HUGE_PAGE_BYTES, UNIT_BYTES, Region

PAGE = 4096
NBYTES = HUGE_PAGE_BYTES


def test_a_region_gives_out_its_addresses_once():
    region = Region(4 * NBYTES)
    assert region.take(4 * NBYTES + 1) is None
    first = region.take(4 * NBYTES)
    assert first is not None and region.take(1) is None
    region.give_back(first, 4 * NBYTES)
    with pytest.raises(AssertionError, match="free already"):
        region.give_back(first, NBYTES)
    assert region.take(1) is not None


def test_blocks_share_a_huge_page_which_is_idle_when_both_are_gone():
    region = Region(4 * NBYTES)
    both = [region.take(UNIT_BYTES), region.take(UNIT_BYTES)]
    assert both[0] is not None and both[1] == both[0] + UNIT_BYTES
    region.give_back(both[0], UNIT_BYTES)
    assert region.idle_pages == 0 and not region.is_empty
    region.give_back(both[1], UNIT_BYTES)
    assert region.idle_pages == 1
    region.trim(2)
    assert region.idle_pages == 0 and region.is_empty


def test_an_idle_page_keeps_its_memory_until_it_is_trimmed():
    region = Region(4 * NBYTES)
    start = region.take(NBYTES)
    assert start is not None
    region.memory[start : start + 4] = b"abcd"
    region.give_back(start, NBYTES)
    assert region.take(NBYTES) == start
    assert region.memory[start : start + 4] == b"abcd"
    region.give_back(start, NBYTES)
    region.trim(1)
    assert region.memory[start : start + 4] == bytes(4)


@pytest.mark.parametrize("seed", range(2))
def test_no_block_loses_a_byte_to_another(seed):
    random, region = Random(seed), Region(64 * NBYTES)
    held: dict[int, tuple[int, bytes]] = {}
    for turn in range(1500):
        if held and random.random() < 0.5:
            start = random.choice(list(held))
            nbytes, mark = held.pop(start)
            last = start + nbytes - 8
            assert region.memory[start : start + 8] == mark
            assert region.memory[last : last + 8] == mark
            region.give_back(start, nbytes)
        else:
            nbytes = random.randrange(16, 12 * NBYTES)
            start = region.take(nbytes)
            if start is not None:
                mark = turn.to_bytes(8, "little")
                region.memory[start : start + 8] = mark
                region.memory[start + nbytes - 8 : start + nbytes] = mark
                held[start] = nbytes, mark
        if turn % 10 == 0:
            region.trim(random.randrange(8))
    for start, (nbytes, _) in held.items():
        region.give_back(start, nbytes)
    assert region.take(64 * NBYTES) is not None, "it is whole again"


VIEWS: dict[str, Callable[[np.ndarray], object]] = {
    "slice of a slice": lambda m: m[10:20][2:4][:1],
    "element": lambda m: m[5:6].reshape(()),
    "another dtype": lambda m: m.view(np.float32)[3:],
    "reversed": lambda m: m.reshape(2, -1).T[::-1],
    "plain array": lambda m: m.view(np.ndarray),
    "array over it": lambda m: np.ndarray((3, 4), np.int16, buffer=m, offset=8),
    "view of one": lambda m: np.ndarray((3, 4), np.int16, buffer=m)[1:].ravel(),
    "memoryview": lambda m: memoryview(m)[3:],
    "frombuffer": lambda m: np.frombuffer(m, np.int64)[1:],
    "dlpack": lambda m: np.from_dlpack(m)[3:],
    "iterator": iter,
    "ctypes": lambda m: (ctypes.c_char * 8).from_buffer(m),
}


def test_memory_goes_back_exactly_when_the_last_view_dies():
    for name, view in VIEWS.items():
        pool = Pool()
        memory = pool.take(NBYTES)
        seen = view(memory)
        del memory
        assert pool.idle_bytes == 0, name
        del seen
        assert pool.idle_bytes == NBYTES, name


def test_a_jax_array_that_aliases_the_memory_keeps_it():
    pool = Pool()
    value = np.ndarray(NBYTES // 4, np.float32, buffer=pool.take(NBYTES))
    value[:] = 3
    array = jax.device_put(value, may_alias=True)
    del value
    others = [pool.take(NBYTES) for _ in range(3)]
    for other in others:
        other[:] = 255
    assert (np.asarray(array) == 3).all()


def test_what_came_back_is_taken_before_what_is_new_whole_or_in_parts():
    pool = Pool()
    memory = pool.take(3 * NBYTES)
    first = address(memory)
    del memory
    parts = [pool.take(NBYTES) for _ in range(3)]
    assert sorted(map(address, parts)) == [first + i * NBYTES for i in range(3)]
    assert pool.idle_bytes == 0
    parts.clear()
    whole = pool.take(3 * NBYTES)
    assert address(whole) == first
    del whole
    taken = [pool.take(NBYTES) for _ in range(4)]
    second = address(taken.pop(1))
    again = pool.take(NBYTES // 2)
    assert second <= address(again) < second + NBYTES


def test_no_more_than_the_limit_is_idle():
    pool = Pool(idle_bytes=3 * NBYTES)
    taken = [pool.take(NBYTES) for _ in range(4)]
    places = {address(memory) for memory in taken}
    while taken:
        del taken[0]
        assert pool.idle_bytes == min(4 - len(taken), 3) * NBYTES
    taken = [pool.take(NBYTES) for _ in range(3)]
    assert {address(memory) for memory in taken} < places
    assert pool.idle_bytes == 0
    small = Pool(idle_bytes=NBYTES)
    small.take(NBYTES + 1)  # Two pages come back.
    assert small.idle_bytes == NBYTES


def test_trim_gives_idle_memory_back_to_the_system():
    pool, nbytes = Pool(), 64 * 2**20
    memory = pool.take(nbytes)
    memory[::PAGE] = 1
    kept = pool.take(NBYTES)
    kept[:] = 3
    before = anonymous_bytes()
    del memory
    assert pool.idle_bytes == nbytes
    pool.trim()
    assert pool.idle_bytes == 0
    assert before - anonymous_bytes() > 0.9 * nbytes
    assert (kept == 3).all()


def test_trim_of_some_bytes_leaves_the_rest():
    pool = Pool()
    blocks = [pool.take(NBYTES) for _ in range(3)]
    first = min(map(address, blocks))
    blocks.clear()
    pool.trim(NBYTES + 1)
    assert pool.idle_bytes == NBYTES
    assert address(pool.take(NBYTES)) == first


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of regions as they are made, of which none has over 100 blocks."""
    sizes: list[int] = []

    class Recorded(Region):
        def __init__(self, nbytes: int) -> None:
            if nbytes > 100 * NBYTES:
                raise OSError("no such range")
            sizes.append(nbytes)
            super().__init__(nbytes)

    monkeypatch.setattr("zinf.memory.pool.Region", Recorded)
    return sizes


def test_where_addresses_are_counted_no_more_are_taken_than_asked(
    reserved, monkeypatch
):
    monkeypatch.setattr("zinf.memory.pool.are_addresses_counted", lambda: True)
    pool = Pool()
    blocks = [pool.take(NBYTES), pool.take(3 * NBYTES)]
    assert reserved == [NBYTES, 3 * NBYTES]
    places = list(map(address, blocks))
    blocks.clear()
    assert address(pool.take(2 * NBYTES)) == places[1]
    pool.trim()
    assert pool.idle_bytes == 0
    pool.take(NBYTES)
    assert reserved == [NBYTES, 3 * NBYTES, NBYTES], "what was empty is gone"


def test_where_addresses_are_short_there_are_fewer(reserved):
    memory = Pool().take(NBYTES)
    memory[:] = 1
    assert 50 * NBYTES <= reserved[0] <= 100 * NBYTES and len(reserved) == 1


class Cycle:
    """Garbage that only the collector finds, and that can see its memory to the end."""

    def __init__(self, memory: np.ndarray, saw: Callable[[np.ndarray], object]) -> None:
        self.memory, self.saw, self.own = memory, saw, self

    def __del__(self) -> None:
        self.saw(self.memory)


def test_memory_in_a_cycle_goes_back_when_it_is_collected_unless_it_is_saved():
    pool, saved = Pool(), []
    Cycle(np.ndarray(NBYTES, np.uint8, buffer=pool.take(NBYTES)), np.sum)
    assert pool.idle_bytes == 0
    gc.collect()
    assert pool.idle_bytes == NBYTES
    Cycle(np.ndarray(NBYTES, np.uint8, buffer=pool.take(NBYTES)), saved.append)
    gc.collect()
    saved[0][:] = 1
    other = pool.take(NBYTES)
    other[:] = 2
    del pool  # Memory outlives its pool.
    gc.collect()
    assert (saved[0] == 1).all() and (other == 2).all()


@contextmanager
def garbage_collected_at_every_turn() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def test_no_block_ever_has_two_owners_while_others_come_back():
    """The collector runs in the middle of `take`, in this thread and in others.

    Threads mark their blocks, and find the mark unchanged when they let go.
    """
    pool, wrong = Pool(idle_bytes=4 * NBYTES), []

    def own(thread: int) -> None:
        random = Random(thread)
        for turn in range(40):
            mark = (thread * 40 + turn) % 251
            nbytes = random.randrange(NBYTES // 2, NBYTES)
            memory = np.ndarray(nbytes, np.uint8, buffer=pool.take(nbytes))
            assert address(memory) % UNIT_BYTES == 0
            memory[::PAGE] = mark

            def check(memory: np.ndarray, mark: int = mark) -> None:
                if (memory[::PAGE] != mark).any():
                    wrong.append(mark)

            Cycle(memory[PAGE:] if turn % 2 else memory, check)
            del memory

    with garbage_collected_at_every_turn(), ThreadPoolExecutor(4) as threads:
        list(threads.map(own, range(4)))
    assert not wrong
    gc.collect()
    assert 0 < pool.idle_bytes <= 4 * NBYTES


def test_large_arrays_come_from_the_common_pool_and_go_back():
    POOL.trim()
    array = aligned_empty((POOLED_FROM_BYTES // 4,), np.float32)
    assert address(array) % UNIT_BYTES == 0
    part = array.reshape(2, -1)[1]
    del array
    assert POOL.idle_bytes == 0
    del part
    # Its first and last page may be other blocks' too.
    assert POOL.idle_bytes >= POOLED_FROM_BYTES - HUGE_PAGE_BYTES
    POOL.trim()
