"""What earlier tests leave in a process: their garbage and their programs.

jax keeps every program that it compiled or read, and its jaxpr, until the process ends.
After a thousand tests that is several GiB, and the garbage collector goes through it
again and again: with Python's own thresholds that took a tenth of the processor's time.
"""

import gc
import sys
from collections.abc import Iterator

import pytest

from zinf.core.process import malloc

# Python's own is 700, of which a trace or a plan makes that many in a millisecond.
NEW_OBJECTS = 50_000
# Memory that a process may gain before programs are unloaded. What the next tests use
# of them is read again from the compile cache.
MAX_GAINED_BYTES = 1 << 30

gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def pytest_collection_finish() -> None:
    """Modules are no garbage, and two thirds of what a full collection looks at."""
    gc.collect()
    gc.freeze()


if sys.platform == "linux":
    least_bytes = malloc.anonymous_bytes()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        global least_bytes
        yield
        is_last_of_file = nextitem is None or nextitem.path != item.path
        gained_bytes = malloc.anonymous_bytes() - least_bytes
        if is_last_of_file and gained_bytes > MAX_GAINED_BYTES and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
            gc.collect()
            malloc.trim()
            least_bytes = malloc.anonymous_bytes()
