"""A block has one owner at a time, and comes back when nobody can see it any more."""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import jax
import numpy as np
import pytest

from zinf.memory.aligned import POOLED_FROM_BYTES, address, aligned_empty
from zinf.memory.heap import resident_bytes
from zinf.memory.pool import HUGE_PAGE_BYTES, LARGEST_WASTE, POOL, Pool

PAGE = 4096
# Large enough to be touched, small enough that thousands are quick.
NBYTES = 16 * PAGE

VIEWS: dict[str, Callable[[np.ndarray], object]] = {
    "slice": lambda m: m[10:20],
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
    "iterator": lambda m: iter(m),
    "ctypes": lambda m: (ctypes.c_char * 8).from_buffer(m),
}


@contextmanager
def garbage_collected_at_every_turn() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class Cycle:
    """Garbage that only the collector finds, and that can see its memory to the end."""

    def __init__(self, memory: np.ndarray, saw: Callable[[np.ndarray], object]) -> None:
        self.memory, self.saw, self.own = memory, saw, self

    def __del__(self) -> None:
        self.saw(self.memory)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 5 * 2**20 + 3])
def test_memory_begins_at_a_huge_page_and_is_as_long_as_asked(nbytes: int) -> None:
    memory = Pool().take(nbytes)
    assert (memory.nbytes, memory.dtype, memory.ndim) == (nbytes, np.uint8, 1)
    assert address(memory) % HUGE_PAGE_BYTES == 0
    memory[:] = 7
    assert memory.all() and memory.flags.c_contiguous


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_goes_back_exactly_when_the_last_view_dies(view) -> None:
    pool = Pool()
    memory = pool.take(NBYTES)
    seen = view(memory)
    del memory
    assert pool.idle_bytes == 0
    del seen
    assert pool.idle_bytes == NBYTES


def test_a_jax_array_that_aliases_the_memory_keeps_it() -> None:
    pool = Pool()
    value = np.ndarray(NBYTES // 4, np.float32, buffer=pool.take(NBYTES))
    value[:] = 3
    array = jax.device_put(value, may_alias=True)
    del value
    others = [pool.take(NBYTES) for _ in range(3)]
    for other in others:
        other[:] = 255
    assert (np.asarray(array) == 3).all()


def test_what_came_back_is_given_out_again() -> None:
    pool = Pool()
    memory = pool.take(NBYTES)
    first = address(memory)
    del memory
    assert address(pool.take(NBYTES)) == first
    assert pool.idle_bytes == NBYTES


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_block_is_given_out_for_a_little_less_only(is_ours: bool) -> None:
    least = int(72 * PAGE / (1 + LARGEST_WASTE))  # 64 pages
    assert least == 64 * PAGE
    pool = Pool()
    memory = pool.take(72 * PAGE)
    first = address(memory)
    del memory
    again = pool.take(least if is_ours else least - PAGE)
    assert (address(again) == first) == is_ours


def test_a_larger_request_gets_memory_of_its_own() -> None:
    pool = Pool()
    del (memory := [pool.take(NBYTES)])[:]
    memory.append(pool.take(NBYTES + 1))
    assert memory[0].nbytes == NBYTES + 1
    assert pool.idle_bytes == NBYTES


def test_the_smallest_block_that_fits_is_taken_and_the_newest_of_those() -> None:
    pool = Pool()
    sizes = [66 * PAGE, 65 * PAGE, 65 * PAGE, 68 * PAGE]
    taken = [pool.take(size) for size in sizes]
    places = [address(memory) for memory in taken]
    while taken:
        del taken[0]
    assert address(pool.take(64 * PAGE)) == places[2]


def test_no_more_than_the_limit_is_idle_and_the_oldest_goes_first() -> None:
    pool = Pool(idle_bytes=3 * NBYTES)
    taken = [pool.take(NBYTES) for _ in range(4)]
    places = [address(memory) for memory in taken]
    while taken:
        del taken[0]
        assert pool.idle_bytes <= 3 * NBYTES
    again = [address(taken.append(pool.take(NBYTES)) or taken[-1]) for _ in range(3)]
    assert set(again) == set(places[1:])
    assert pool.idle_bytes == 0


def test_a_block_beyond_the_limit_is_not_kept() -> None:
    pool = Pool(idle_bytes=NBYTES)
    pool.take(NBYTES + 1)
    assert pool.idle_bytes == 0


def test_trim_gives_idle_memory_back_to_the_system() -> None:
    pool, nbytes = Pool(), 64 * 2**20
    memory = pool.take(nbytes)
    memory[::PAGE] = 1
    kept = pool.take(NBYTES)
    kept[:] = 3
    before = resident_bytes()
    del memory
    assert pool.idle_bytes == nbytes
    pool.trim()
    assert pool.idle_bytes == 0
    assert before - resident_bytes() > 0.9 * nbytes
    assert (kept == 3).all()


def test_trim_of_some_bytes_takes_the_oldest() -> None:
    pool = Pool(idle_bytes=8 * NBYTES)
    blocks = [pool.take(NBYTES) for _ in range(3)]
    newest = address(blocks[-1])
    while blocks:
        del blocks[0]
    pool.trim(NBYTES + 1)
    assert pool.idle_bytes == NBYTES
    assert address(pool.take(NBYTES)) == newest


def test_memory_outlives_its_pool() -> None:
    memory = Pool().take(NBYTES)
    gc.collect()
    memory[:] = 1
    assert memory.all()


def test_memory_in_a_cycle_goes_back_when_that_is_collected() -> None:
    pool = Pool()
    Cycle(np.ndarray(NBYTES, np.uint8, buffer=pool.take(NBYTES)), np.sum)
    assert pool.idle_bytes == 0
    gc.collect()
    assert pool.idle_bytes == NBYTES


def test_an_array_that_is_saved_from_the_collector_keeps_its_memory() -> None:
    pool, saved = Pool(), []
    Cycle(np.ndarray(NBYTES, np.uint8, buffer=pool.take(NBYTES)), saved.append)
    gc.collect()
    saved[0][:] = 1
    other = pool.take(NBYTES)
    other[:] = 2
    assert (saved[0] == 1).all()


def test_no_block_ever_has_two_owners() -> None:
    """Threads mark their blocks, and find the mark unchanged when they let go."""
    pool = Pool(idle_bytes=8 * NBYTES)

    def own(thread: int) -> None:
        random, held = Random(thread), []
        for turn in range(150):
            memory = pool.take(random.randrange(NBYTES // 2, NBYTES))
            mark = (thread * 31 + turn) % 251
            memory[::512] = mark
            held.append((memory[3:] if turn % 2 else memory, mark, turn % 2))
            del memory
            while len(held) > random.randrange(6):
                view, mark, is_slice = held.pop(random.randrange(len(held)))
                start = 512 - 3 if is_slice else 0
                assert (view[start::512] == mark).all()
                del view

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(own, range(8)))
    assert 0 < pool.idle_bytes <= 8 * NBYTES


def test_memory_may_come_back_while_the_pool_is_at_work() -> None:
    """The collector runs in the middle of `take`, in this thread and in others."""
    pool, wrong = Pool(idle_bytes=4 * NBYTES), []

    def own(thread: int) -> None:
        for turn in range(60):
            mark = (thread * 60 + turn) % 251
            memory = np.ndarray(NBYTES, np.uint8, buffer=pool.take(NBYTES))
            memory[::512] = mark

            def check(memory: np.ndarray, mark: int = mark) -> None:
                if (memory[::512] != mark).any():
                    wrong.append(mark)

            Cycle(memory, check)
            del memory

    with garbage_collected_at_every_turn():
        threads = [threading.Thread(target=own, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_large_arrays_come_from_the_common_pool_and_go_back() -> None:
    POOL.trim()
    array = aligned_empty((POOLED_FROM_BYTES // 4,), np.float32)
    assert address(array) % HUGE_PAGE_BYTES == 0
    part = array.reshape(2, -1)[1]
    del array
    assert POOL.idle_bytes == 0
    del part
    assert POOL.idle_bytes == POOLED_FROM_BYTES
    POOL.trim()
