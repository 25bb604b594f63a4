"""The threads of a drive, and what they do when the kernel does not answer."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Barrier, Event
from time import sleep

import pytest

from tests.clock import Clock, still
from tests.robustness.faults import (
    SECONDS_TO_WAIT,
    Gate,
    Rule,
    eventually,
    fail,
    open_buffered,
    open_files,
    threads_of,
)
from zinf.core.memory import StorageError
from zinf.core.memory.nvme import Drive, Profile, System, open_file, save_profile
from zinf.core.memory.nvme import drive as drive_module
from zinf.core.memory.nvme.drive import Direction
from zinf.core.memory.nvme.open_file import Mover
from zinf.core.memory.nvme.request import Request, Task

# Exact in binary, as the boundary is tested.
STALL_SECONDS = 0.25


def ask(drive: Drive, direction: Direction, *tasks: Task) -> Future:
    request = Request("Cannot do it", len(tasks), lambda: "done")
    drive.submit(direction, request, tasks)
    return request.future


def asking(call: Callable[[], object]) -> Task:
    """A task that asks the kernel for something."""
    return lambda mover: mover.call(call)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def clock() -> Iterator[Clock]:
    """By which drives know how long the kernel has not answered."""
    with still("monotonic", drive_module, open_file) as clock:
        yield clock


@pytest.mark.parametrize("num_threads", [1, 4])
def test_as_many_reads_and_writes_run_at_once_as_the_profile_beside_the_files_says(
    tmp_nvme, num_threads
):
    """And neither they nor rare operations wait for each other."""
    save_profile(Profile(block_bytes=8192, num_threads=num_threads), tmp_nvme)
    assert Drive(tmp_nvme, profile=Profile()).profile == Profile()
    meet = Barrier(2 * num_threads + 1)

    def task(mover: Mover) -> None:
        assert mover.block_bytes == 8192
        meet.wait(SECONDS_TO_WAIT)

    with Drive(tmp_nvme) as drive:
        asked = [ask(drive, kind, *[task] * num_threads) for kind in ("read", "write")]
        drive.run("Cannot do it", task)
        assert [future.result(SECONDS_TO_WAIT) for future in asked] == ["done"] * 2
        # And the watch.
        assert len(threads_of(drive.folder)) == 2 * num_threads + 2


def test_close_finishes_what_is_pending_and_ends_the_threads(tmp_nvme):
    ran = []
    with Drive(tmp_nvme) as drive:
        tasks = [lambda m: (sleep(0.001), ran.append(1))] * 50
        asked = [ask(drive, direction, *tasks) for direction in ("read", "write")]
    assert all(future.done() for future in asked)
    assert len(ran) == 100
    assert threads_of(tmp_nvme) == []
    drive.close()
    with pytest.raises(ValueError, match="is closed. Open a new one"):
        ask(drive, "read", lambda m: None)


def test_callbacks_may_ask_for_more_though_one_thread_moves_all(make_drive):
    drive, done = make_drive(num_threads=1), Event()

    def again(future: Future) -> None:
        drive.run("Cannot do it", lambda m: None)
        ask(drive, "write", lambda m: None).add_done_callback(lambda _: done.set())

    ask(drive, "write", lambda m: None).add_done_callback(again)
    assert done.wait(SECONDS_TO_WAIT)


def test_all_that_is_asked_of_a_drive_that_stalls_fails_until_it_has_answered(
    make_drive, gate, clock, tmp_nvme
):
    drive = make_drive(num_threads=2, stall_seconds=STALL_SECONDS)
    asked = [
        ask(drive, kind, asking(gate.hold))
        for kind in ("read", "write")
        for _ in "12345"
    ]
    gate.wait(2 * 2)
    clock.advance(STALL_SECONDS)
    assert not drive.is_stalled
    clock.advance(STALL_SECONDS / 2)
    for future in asked:
        with pytest.raises(StorageError, match="has not answered for 0.4 ") as error:
            future.result(SECONDS_TO_WAIT)
        assert error.value.errno == errno.ETIMEDOUT
        assert error.value.filename == str(tmp_nvme)
        assert "Cannot do it" in str(error.value)
        assert "memory.stall_seconds is 0.25" in str(error.value)
    assert drive.is_stalled
    ran = []
    for direction in ("read", "write"):
        # The clock stands still: nothing is waited for.
        refused = ask(drive, direction, lambda m: ran.append(1))
        with pytest.raises(StorageError, match="has not answered"):
            refused.result(0)
    with pytest.raises(StorageError, match="Cannot make it: .* not answered"):
        drive.run("Cannot make it", lambda m: ran.append(1))
    gate.open()
    eventually(lambda: not drive.is_stalled)
    assert ran == []
    for direction in ("read", "write"):
        assert ask(drive, direction, asking(gate.hold)).result(SECONDS_TO_WAIT)


def test_close_does_not_wait_for_a_kernel_that_does_not_answer(tmp_nvme, gate, clock):
    drive = Drive(tmp_nvme, stall_seconds=STALL_SECONDS)
    stuck = ask(drive, "write", asking(gate.hold))
    gate.wait()
    clock.advance(1.5 * STALL_SECONDS)
    drive.close()
    assert isinstance(stuck.exception(0), StorageError)
    gate.open()
    eventually(lambda: not threads_of(tmp_nvme))


def test_slow_is_not_stalled(make_drive, clock):
    """Each answer must come in time, not all of a request or a queue."""
    drive = make_drive(num_threads=1, stall_seconds=STALL_SECONDS)
    slowly = asking(lambda: clock.advance(0.9 * STALL_SECONDS))

    def work(mover: Mover) -> None:
        """Between calls."""
        clock.advance(10 * STALL_SECONDS)
        # The watch looks after a quarter of what is allowed.
        sleep(STALL_SECONDS)

    asked = [ask(drive, "write", slowly, slowly, work) for _ in range(2)]
    assert [future.result(SECONDS_TO_WAIT) for future in asked] == ["done"] * 2


def test_files_that_take_no_direct_requests_are_used_with_a_warning(tmp_nvme, caplog):
    assert Drive(tmp_nvme).is_direct and caplog.text == ""
    with caplog.at_level(logging.WARNING):
        drive = Drive(tmp_nvme, system=System(open=open_buffered))
    assert not drive.is_direct
    assert "does not take O_DIRECT" in caplog.text and str(tmp_nvme) in caplog.text
    assert os.listdir(tmp_nvme) == []


def test_a_folder_that_cannot_be_probed_is_an_error_that_leaves_nothing(
    tmp_nvme, layer
):
    with pytest.raises(StorageError, match="Cannot write to the folder") as error:
        Drive(tmp_nvme / "missing")
    assert error.value.errno == errno.ENOENT
    with layer.broken(Rule("open", fail(errno.EIO))):
        with pytest.raises(StorageError, match="Cannot write to the folder") as error:
            Drive(tmp_nvme, system=layer.system)
    assert error.value.errno == errno.EIO
    assert os.listdir(tmp_nvme) == open_files(tmp_nvme) == []
    # Where nothing may be written, a file to read is enough.
    (tmp_nvme / "probe").touch()
    assert Drive(tmp_nvme / "missing", probe=tmp_nvme / "probe").is_direct
    with pytest.raises(StorageError, match="Cannot read the folder"):
        Drive(tmp_nvme, probe=tmp_nvme / "missing")
