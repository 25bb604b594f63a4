"""What is held does not change, and nothing else waits for it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from zinf.memory.hold import Holds
from zinf.program import ArrayId, Role

WHOLE = ArrayId(Role.PARAM, "kernel")


def rows(start: int, stop: int) -> ArrayId:
    return ArrayId(Role.PARAM, "kernel", (start, stop))


@pytest.mark.parametrize(
    ("held", "wanted", "waits"),
    [
        (WHOLE, WHOLE, True),
        (WHOLE, rows(3, 4), True),
        (rows(3, 4), WHOLE, True),
        (rows(2, 4), rows(3, 5), True),
        (rows(2, 4), rows(4, 5), False),
        (WHOLE, ArrayId(Role.MASTER, "kernel"), False),
    ],
    ids=str,
)
def test_who_changes_rows_that_are_held_waits_for_them(held, wanted, waits):
    holds = Holds()
    holds.hold([held])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(holds.wait, wanted)
        if not waits:
            waiting.result(timeout=30)
            return
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.05)
        holds.release(held)
        waiting.result(timeout=30)


def test_what_is_held_twice_is_released_twice():
    holds = Holds()
    holds.hold([WHOLE, WHOLE])
    holds.release(WHOLE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(holds.wait, WHOLE)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.05)
        holds.release(WHOLE)
        waiting.result(timeout=30)
    holds.wait(WHOLE)
