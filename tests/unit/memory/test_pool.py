"""A block has one owner at a time, and comes back when nobody can see it any more."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest

from zinf.core.memory.host.aligned import address, aligned_empty
from zinf.core.memory.host.pool import POOL, Pool
from zinf.core.memory.host.region import HUGE_PAGE_BYTES, UNIT_BYTES, Region
from zinf.core.process.malloc import anonymous_bytes

PAGE = 4096
NBYTES = HUGE_PAGE_BYTES


@pytest.mark.parametrize("seed", range(3))
def test_a_region_is_units_with_one_owner_each_of_pages_that_stay_in_memory(seed):
    """Blocks, places, idle pages and content are as in a list of units."""
    random, num_pages = Random(seed), 12
    region = Region((num_pages - 1) * NBYTES + 1)
    assert region.nbytes == num_pages * NBYTES and region.address % NBYTES == 0
    per_page = NBYTES // UNIT_BYTES
    is_taken = np.zeros(num_pages * per_page, bool)
    is_touched = np.zeros(num_pages, bool)
    held: dict[int, tuple[int, bytes]] = {}
    origin = region.address - address(np.frombuffer(region.memory, np.uint8))

    def num_new(first: int, last: int) -> int:
        return np.count_nonzero(~is_touched[first // per_page : -(-last // per_page)])

    def free_ranges() -> list[tuple[int, int]]:
        edges = np.flatnonzero(np.diff([True, *is_taken, True]))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    for turn in range(600):
        choice = random.random()
        if held and choice < 0.45:
            offset = random.choice(list(held))
            nbytes, mark = held.pop(offset)
            for place in (offset, offset + nbytes - 8):
                assert region.memory[place : place + 8] == mark
            region.give_back(offset, nbytes)
            first, size = (offset - origin) // UNIT_BYTES, -(-nbytes // UNIT_BYTES)
            is_taken[first : first + size] = False
        elif choice < 0.9:
            nbytes = random.choice([UNIT_BYTES, random.randrange(16, 5 * NBYTES)])
            size = -(-nbytes // UNIT_BYTES)
            fits = [(a, b) for a, b in free_ranges() if b - a >= size]
            offset = region.take(nbytes)
            assert (offset is None) == (not fits)
            if offset is None:
                continue
            first = (offset - origin) // UNIT_BYTES
            # With the fewest new pages, in the smallest range, at the lowest address.
            best = min(
                (num_new(start, start + size), b - a, start)
                for a, b in fits
                for start in (a, b - size)
            )
            assert best[2] == first and not is_taken[first : first + size].any()
            is_taken[first : first + size] = True
            is_touched[first // per_page : -(-(first + size) // per_page)] = True
            mark = turn.to_bytes(8, "little")
            for place in (offset, offset + nbytes - 8):
                region.memory[place : place + 8] = mark
            held[offset] = nbytes, mark
        else:
            idle = np.flatnonzero(is_touched & ~is_taken.reshape(-1, per_page).any(1))
            num_trimmed = random.randrange(4)
            region.trim(num_trimmed)
            is_touched[idle[max(len(idle) - num_trimmed, 0) :]] = False
        is_idle = is_touched & ~is_taken.reshape(-1, per_page).any(1)
        assert region.idle_pages == np.count_nonzero(is_idle)
        assert region.is_empty == (not is_touched.any())


def test_an_idle_page_keeps_its_memory_until_it_is_trimmed():
    region = Region(4 * NBYTES)
    start = region.take(NBYTES)
    region.memory[start : start + 4] = b"abcd"
    region.give_back(start, NBYTES)
    with pytest.raises(AssertionError, match="free already"):
        region.give_back(start, NBYTES)
    assert region.take(NBYTES) == start
    assert region.memory[start : start + 4] == b"abcd"
    region.give_back(start, NBYTES)
    region.trim(1)
    assert region.memory[start : start + 4] == bytes(4)


VIEWS: dict[str, Callable[[np.ndarray], object]] = {
    "slice of a slice": lambda m: m[10:20][2:4][:1],
    "another dtype": lambda m: m.view(np.float32)[3:],
    "reversed": lambda m: m.reshape(2, -1).T[::-1],
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


def test_what_came_back_is_taken_before_what_is_new_whole_or_in_parts():
    pool = Pool()
    memory = pool.take(3 * NBYTES)
    first = address(memory)
    del memory
    parts = [pool.take(NBYTES) for _ in range(3)]
    assert sorted(map(address, parts)) == [first + i * NBYTES for i in range(3)]
    assert pool.idle_bytes == 0
    parts.clear()
    assert address(pool.take(3 * NBYTES)) == first


def test_no_more_than_the_limit_is_idle():
    pool = Pool(idle_bytes=3 * NBYTES)
    taken = [pool.take(NBYTES) for _ in range(4)]
    while taken:
        del taken[0]
        assert pool.idle_bytes == min(4 - len(taken), 3) * NBYTES
    small = Pool(idle_bytes=NBYTES)
    small.take(NBYTES + 1)  # Two pages come back.
    assert small.idle_bytes == NBYTES


def test_trim_gives_some_or_all_idle_memory_back_to_the_system():
    pool, nbytes = Pool(), 64 * 2**20
    memory = pool.take(nbytes)
    memory[::PAGE] = 1
    kept = pool.take(NBYTES)
    kept[:] = 3
    before = anonymous_bytes()
    del memory
    assert pool.idle_bytes == nbytes
    pool.trim(NBYTES + 1)
    assert pool.idle_bytes == nbytes - 2 * NBYTES
    pool.trim()
    assert pool.idle_bytes == 0
    assert before - anonymous_bytes() > 0.9 * nbytes
    assert (kept == 3).all()


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

    monkeypatch.setattr("zinf.core.memory.host.pool.Region", Recorded)
    return sizes


def test_where_addresses_are_counted_no_more_are_taken_than_asked(
    reserved, monkeypatch
):
    monkeypatch.setattr(
        "zinf.core.memory.host.pool.are_addresses_counted", lambda: True
    )
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


@pytest.fixture
def garbage_collected_at_every_turn() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*thresholds)


def test_no_block_ever_has_two_owners_while_others_come_back(
    garbage_collected_at_every_turn,
):
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

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(own, range(4)))
    assert not wrong
    gc.collect()
    assert 0 < pool.idle_bytes <= 4 * NBYTES


def test_large_arrays_come_from_the_common_pool_and_go_back():
    POOL.trim()
    array = aligned_empty((2 * HUGE_PAGE_BYTES // 4,), np.float32)
    assert address(array) % UNIT_BYTES == 0
    part = array.reshape(2, -1)[1]
    del array
    assert POOL.idle_bytes == 0
    del part
    # Its first and last page may be other blocks' too.
    assert POOL.idle_bytes >= HUGE_PAGE_BYTES
    POOL.trim()
