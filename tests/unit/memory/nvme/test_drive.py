import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Barrier, Event
from time import sleep

import pytest

from tests.clock import Clock, still
from tests.unit.memory.nvme.conftest import (
    SECONDS_TO_WAIT,
    Gate,
    eventually,
    open_files,
    threads_of,
)
from zinf.memory import StorageError
from zinf.memory.nvme import Drive, Profile, System, open_file, save_profile
from zinf.memory.nvme import drive as drive_module
from zinf.memory.nvme.drive import Direction
from zinf.memory.nvme.open_file import Mover
from zinf.memory.nvme.request import Request, Task

STALL_SECONDS = 0.2


def ask(drive: Drive, direction: Direction, *tasks: Task) -> Future:
    request = Request("Cannot do it", len(tasks), lambda: "done")
    drive.submit(direction, request, tasks)
    return request.future


def asking(call: Callable[[], object]) -> Task:
    """A task that asks the kernel for something."""
    return lambda mover: mover.call(call)


@pytest.fixture
def gate() -> Gate:
    """A call that does nothing, or does not answer while the gate is shut."""
    return Gate(lambda: None)


@pytest.fixture
def clock() -> Iterator[Clock]:
    """By which drives know how long the kernel has not answered."""
    with still("monotonic", drive_module, open_file) as clock:
        yield clock


@pytest.fixture
def stalling(make_drive: Callable[..., Drive], clock: Clock) -> Drive:
    return make_drive(num_threads=2, stall_seconds=STALL_SECONDS)


def stall(clock: Clock, gate: Gate, *, num_calls: int) -> None:
    """Let so many calls wait for longer than is allowed."""
    eventually(lambda: gate.num_waiting == num_calls)
    clock.advance(1.5 * STALL_SECONDS)


def test_a_task_runs_in_another_thread_and_its_error_is_raised_here(
    drive: Drive,
) -> None:
    ran = []
    drive.run("Cannot do it", lambda m: ran.append((m.what, threading.get_ident())))
    assert ran[0][0] == "Cannot do it" and ran[0][1] != threading.get_ident()
    with pytest.raises(KeyError, match="missing"):
        drive.run("Cannot do it", lambda m: {}["missing"])


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_as_many_tasks_run_at_once_as_there_are_threads(
    make_drive: Callable[..., Drive], num_threads: int, direction: Direction
) -> None:
    drive = make_drive(num_threads=num_threads)
    meet = Barrier(num_threads)
    tasks = [lambda m: meet.wait(SECONDS_TO_WAIT)] * (3 * num_threads)
    assert ask(drive, direction, *tasks).result(SECONDS_TO_WAIT) == "done"


def test_reads_writes_and_what_is_rare_do_not_wait_for_each_other(
    drive: Drive,
) -> None:
    may_end = Event()
    block = [lambda m: may_end.wait(SECONDS_TO_WAIT)] * drive.profile.num_threads
    slow = ask(drive, "write", *block)
    assert ask(drive, "read", lambda m: None).result(SECONDS_TO_WAIT) == "done"
    slow_too = ask(drive, "read", *block)
    drive.run("Cannot do it", lambda m: None)
    assert not slow.done() and not slow_too.done()
    may_end.set()


def test_a_thread_uses_the_request_size_of_the_profile(drive: Drive) -> None:
    sizes = []
    ask(drive, "read", lambda m: sizes.append(m.block_bytes)).result(SECONDS_TO_WAIT)
    assert sizes == [drive.profile.block_bytes]


def test_the_profile_beside_the_files_is_found(tmp_nvme: Path) -> None:
    save_profile(Profile(block_bytes=8192, num_threads=3), tmp_nvme)
    assert Drive(tmp_nvme).profile.block_bytes == 8192
    assert Drive(tmp_nvme, profile=Profile()).profile == Profile()
    (tmp_nvme / "deep" / "er").mkdir(parents=True)
    assert Drive(tmp_nvme / "deep" / "er").profile.num_threads == 3


def test_flush_waits_for_all_and_raises_nothing(drive: Drive) -> None:
    def fail(mover: Mover) -> None:
        sleep(0.02)
        raise OSError(errno.EIO, "whatever")

    asked = [ask(drive, d, fail) for d in ("read", "write", "rare") for _ in range(9)]
    drive.flush()
    assert all(future.done() for future in asked)
    drive.flush()


def test_a_drive_that_is_never_asked_has_no_threads(
    drive: Drive, tmp_nvme: Path
) -> None:
    assert threads_of(tmp_nvme) == []


def test_close_finishes_what_is_pending_and_ends_the_threads(tmp_nvme: Path) -> None:
    ran = []
    with Drive(tmp_nvme) as drive:
        tasks = [lambda m: (sleep(0.001), ran.append(1))] * 50
        asked = [ask(drive, direction, *tasks) for direction in ("read", "write")]
        assert threads_of(tmp_nvme)
    assert all(future.done() for future in asked)
    assert len(ran) == 100
    assert threads_of(tmp_nvme) == []
    drive.close()


def test_callbacks_may_ask_for_more_and_flush_sees_it(drive: Drive) -> None:
    done = Event()

    def again(future: Future) -> None:
        drive.run("Cannot do it", lambda m: None)
        ask(drive, "write", lambda m: None).add_done_callback(lambda _: done.set())

    ask(drive, "write", lambda m: None).add_done_callback(again)
    assert done.wait(SECONDS_TO_WAIT)


def test_many_threads_may_ask_at_once(drive: Drive) -> None:
    count, lock = [0], threading.Lock()

    def add(mover: Mover) -> None:
        with lock:
            count[0] += 1

    def work() -> None:
        for number in range(50):
            ask(drive, ("read", "write")[number % 2], add, add)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    drive.flush()
    assert count == [6 * 50 * 2]


def test_when_the_kernel_does_not_answer_all_that_is_pending_fails(
    stalling: Drive, gate: Gate, clock: Clock, tmp_nvme: Path
) -> None:
    gate.shut()
    asked = [ask(stalling, "write", asking(gate)) for _ in range(5)]
    asked += [ask(stalling, "read", asking(gate)) for _ in range(5)]
    stall(clock, gate, num_calls=2 * 2)
    for future in asked:
        with pytest.raises(StorageError, match="has not answered for 0.3") as error:
            future.result(SECONDS_TO_WAIT)
        assert error.value.errno == errno.ETIMEDOUT
        assert error.value.filename == str(tmp_nvme)
        assert "Cannot do it" in str(error.value)
        assert "memory.stall_seconds is 0.2" in str(error.value)
    gate.open()


def test_a_drive_that_is_stuck_refuses_requests_until_it_has_answered(
    stalling: Drive, gate: Gate, clock: Clock
) -> None:
    gate.shut()
    stuck = ask(stalling, "read", asking(gate))
    stall(clock, gate, num_calls=1)
    with pytest.raises(StorageError):
        stuck.result(SECONDS_TO_WAIT)
    assert stalling.is_stalled
    ran = []
    for direction in ("read", "write"):
        with pytest.raises(StorageError, match="has not answered") as error:
            ask(stalling, direction, lambda m: ran.append(1)).result(0)
        assert error.value.errno == errno.ETIMEDOUT
    with pytest.raises(StorageError, match="Cannot make it: .* not answered"):
        stalling.run("Cannot make it", lambda m: ran.append(1))
    gate.open()
    eventually(lambda: not stalling.is_stalled)
    assert ran == []
    for direction in ("read", "write"):
        asked = ask(stalling, direction, asking(gate))
        assert asked.result(SECONDS_TO_WAIT) == "done"


def test_close_does_not_wait_for_a_kernel_that_does_not_answer(
    tmp_nvme: Path, gate: Gate, clock: Clock
) -> None:
    drive = Drive(tmp_nvme, stall_seconds=STALL_SECONDS)
    gate.shut()
    stuck = ask(drive, "write", asking(gate))
    stall(clock, gate, num_calls=1)
    drive.close()
    # It is closed, and the gate is shut.
    assert isinstance(stuck.exception(0), StorageError)
    gate.open()
    eventually(lambda: not threads_of(tmp_nvme))


def test_slow_is_not_stalled(make_drive: Callable[..., Drive], clock: Clock) -> None:
    """It is each answer that must come in time, not all of a request or a queue."""
    drive = make_drive(num_threads=1, stall_seconds=STALL_SECONDS)
    slowly = asking(lambda: clock.advance(0.9 * STALL_SECONDS))
    asked = [ask(drive, "write", slowly, slowly) for _ in range(4)]
    assert [future.result(SECONDS_TO_WAIT) for future in asked] == ["done"] * 4


def test_work_between_calls_is_not_stalled(
    make_drive: Callable[..., Drive], clock: Clock
) -> None:
    drive = make_drive(stall_seconds=STALL_SECONDS)

    def work(mover: Mover) -> None:
        clock.advance(10 * STALL_SECONDS)
        # The watch looks after a quarter of what is allowed.
        sleep(STALL_SECONDS)

    assert ask(drive, "read", work).result(SECONDS_TO_WAIT) == "done"


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Cannot write to the folder") as error:
        Drive(tmp_path / "missing")
    assert error.value.errno == errno.ENOENT


def test_files_that_take_no_direct_requests_are_used_with_a_warning(
    tmp_nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def without_direct(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return os.open(path, flags, *mode)

    with caplog.at_level(logging.WARNING):
        drive = Drive(tmp_nvme, system=System(open=without_direct))
    assert not drive.is_direct
    assert "does not take O_DIRECT" in caplog.text and str(tmp_nvme) in caplog.text
    assert os.listdir(tmp_nvme) == []


def test_another_error_of_the_probe_is_raised_and_leaves_nothing(
    tmp_nvme: Path,
) -> None:
    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "whatever")

    with pytest.raises(StorageError, match="Cannot write to the folder") as error:
        Drive(tmp_nvme, system=System(open=broken))
    assert error.value.errno == errno.EIO
    assert os.listdir(tmp_nvme) == open_files(tmp_nvme) == []
