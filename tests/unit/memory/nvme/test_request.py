"""One request: several tasks, one future, and no memory kept."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import numpy as np
import pytest

from tests.robustness.faults import SECONDS_TO_WAIT
from zinf.core.memory.nvme.open_file import Mover
from zinf.core.memory.nvme.request import Request
from zinf.core.memory.nvme.system import System


def mover() -> Mover:
    return Mover(System(), 4096, is_direct=False)


def fail(mover: Mover) -> None:
    raise OSError("first")


def request(num_tasks: int, finish: Callable[[], object] = lambda: "done") -> Request:
    return Request("Cannot do it", num_tasks, finish)


def test_the_future_is_done_after_the_last_task_and_cannot_be_cancelled():
    asked, ran = request(3), []
    for _ in range(3):
        assert not asked.future.done() and not asked.future.cancel()
        asked.run(lambda m: ran.append(m.what), mover())
    assert asked.future.result(0) == "done"
    assert ran == ["Cannot do it"] * 3
    assert request(0).future.result(0) == "done"
    failing = request(1, lambda: {}["missing"])
    failing.run(lambda m: None, mover())
    with pytest.raises(KeyError, match="missing"):
        failing.future.result(0)


def test_after_a_failure_nothing_begins_and_the_error_waits_for_what_runs():
    """Who gets the error has its memory again, so no task may use that any more."""
    ran, entered, may_end = [], Event(), Event()
    asked = request(4, lambda: ran.append("finished"))

    def slow(mover: Mover) -> None:
        entered.set()
        assert may_end.wait(SECONDS_TO_WAIT)
        raise OSError("second")

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asked.run, slow, mover())
        assert entered.wait(SECONDS_TO_WAIT)
        asked.run(fail, mover())
        for number in range(2):
            asked.run(lambda m, number=number: ran.append(number), mover())
        assert not asked.future.done()
        may_end.set()
        running.result(SECONDS_TO_WAIT)
    with pytest.raises(OSError, match="first"):
        asked.future.result(0)
    assert ran == []


def test_abandoning_fails_now_and_what_comes_later_changes_nothing():
    asked, seen, used = request(2), [], mover()

    def give_up(mover: Mover) -> None:
        mover.check_wanted()
        asked.abandon(OSError("gone"))
        with pytest.raises(OSError, match="given up"):
            mover.check_wanted()
        seen.append("ran")

    asked.run(give_up, used)
    asked.run(lambda m: seen.append("late"), used)
    asked.abandon(OSError("again"))
    with pytest.raises(OSError, match="gone"):
        asked.future.result(0)
    assert seen == ["ran"]
    used.check_wanted()  # The thread is free for what comes next.


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_done_request_keeps_no_memory_even_if_its_thread_stays(is_failed):
    def use(memory: np.ndarray, mover: Mover) -> None:
        if is_failed:
            raise OSError from ValueError()

    memory, used = np.zeros(3).view(type("Weak", (np.ndarray,), {})), mover()
    kept = weakref.ref(memory)
    asked = request(1)
    gc.disable()
    try:
        asked.run(partial(use, memory), used)
        # Who keeps the error does not keep the memory.
        future = asked.future
        del asked, memory
        assert kept() is None
        assert (future.exception() is not None) == is_failed
    finally:
        gc.enable()
