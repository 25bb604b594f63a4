"""Runs a function that needs no GIL over blocks of a range, on several threads.

Numba's own parallel loops cannot be used: without TBB or OpenMP they run on a pool that
aborts the process when two Python threads use it at once, as training threads do.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from threading import Lock

from numba import config

# With fewer elements, waking a thread or taking the GIL costs more than it saves.
LEAST_NUMEL = 1 << 17
# Enough blocks that other threads can take over from one that waits for XLA, and so few
# that taking the GIL between blocks is free (16 took 4% longer).
BLOCKS_PER_THREAD = 4
# Blocks start at whole cache lines, of any element type, if the range does.
BLOCK_MULTIPLE = 1024
STARTING = Lock()


def for_blocks(
    function: Callable[[int, int], None],
    *,
    start: int,
    stop: int,
    num_threads: int | None,
) -> None:
    """Calls `function(i, j)` for ranges that make up `start:stop`, and waits for all.

    The caller's thread works too, and waits only for blocks that have begun. So this
    cannot deadlock, whatever number of threads call it, also in forked processes.
    """
    numel = stop - start
    threads = min(num_threads or usable_cores(), max(numel // LEAST_NUMEL, 1))
    if threads == 1:
        if numel:
            function(start, stop)
        return
    block = max(-(-numel // (threads * BLOCKS_PER_THREAD)), LEAST_NUMEL)
    block = -(-block // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
    numbers = count()

    def work() -> None:
        # `next` of a count is atomic.
        while (begin := start + next(numbers) * block) < stop:
            function(begin, min(begin + block, stop))

    helpers = [_pool().submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        for helper in begun:
            helper.result()


def usable_cores() -> int:
    """Cores that this process may run on; what numba would use."""
    return vars(config)["NUMBA_DEFAULT_NUM_THREADS"]


def _pool() -> ThreadPoolExecutor:
    with STARTING:
        return _make_pool()


@cache
def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="zinf-kernels")
