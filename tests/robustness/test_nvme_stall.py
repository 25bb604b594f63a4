"""A drive that does not answer fails in time, and works again when it does."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from errno import EIO, ETIMEDOUT
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.clock import Clock, still
from tests.robustness.faults import (
    SECONDS_TO_WAIT,
    Call,
    Gate,
    Rule,
    eventually,
    fail,
    threads_of,
)
from tests.robustness.faulty_store import ARRAY, SIZES, VERBS, Bench, benches
from zinf.memory.nvme import Profile, drive, open_file, save_profile
from zinf.memory.storage_error import StorageError

Make = Callable[..., Bench]

STALL_SECONDS = 0.2
STALLS = [
    ("create", "allocate"),
    ("first write", "pwritev"),
    ("overwrite", "open"),
    ("overwrite", "pwritev"),
    ("overwrite", "close"),
    ("replace", "allocate"),
    ("replace", "replace"),
    ("write row", "preadv"),
    ("read", "open"),
    ("read", "stat"),
    ("read", "preadv"),
]


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    """By which drives know how long the kernel has not answered."""
    with still("monotonic", drive, open_file) as clock:
        yield clock


@pytest.fixture
def make(tmp_nvme: Path) -> Iterator[Make]:
    with benches(tmp_nvme) as make:
        yield make


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """The result of a call that may hang."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future


def stall(function: Callable[[], Any], gate: Gate, clock: Clock) -> StorageError:
    """What `function` raises when the kernel has not answered for too long."""
    future = in_thread(function)
    gate.wait()
    clock.advance(1.5 * STALL_SECONDS)
    error = future.exception(SECONDS_TO_WAIT)
    assert isinstance(error, StorageError)
    assert error.errno == ETIMEDOUT
    assert "has not answered for 0." in str(error)
    assert f"memory.stall_seconds is {STALL_SECONDS:g}" in str(error)
    assert "Check the drive and its cable" in str(error)
    return error


def recover(bench: Bench, gate: Gate) -> None:
    """Let the drive answer, and wait until it has answered everything."""
    gate.open()
    drives = bench.store._drives
    eventually(lambda: all(m.busy_since is None for d in drives for m in d._movers))


@pytest.mark.parametrize("size", SIZES)
def test_a_drive_that_stalls_fails_in_time_and_may_recover(
    make: Make, clock: Clock, size: str
) -> None:
    bench = make(size, stall_seconds=STALL_SECONDS)
    for name, call in STALLS:
        verb, gate = VERBS[name], Gate()
        verb.prepare(bench)
        with bench.layer.broken(Rule(call, gate, path="*/c.1.0*")):
            error = stall(lambda verb=verb: verb.run(bench), gate, clock)
            assert error.strerror.startswith(verb.what)
            recover(bench, gate)
        bench.expect_at_rest(is_there=name != "create")
        if name != "create":
            bench.expect_one_of(bench.old, bench.new)
    bench.expect_works()


def test_rows_beside_a_write_that_stalls_fail_in_time(make: Make, clock: Clock) -> None:
    bench, gate = make(stall_seconds=STALL_SECONDS), Gate()
    bench.fill()
    row, last = (
        replace(ARRAY, rows=(r, r + 1)) for r in (bench.size.row, bench.size.row + 1)
    )
    with bench.layer.broken(Rule("pwritev", gate)):
        writing = bench.store.write(row, bench.new[:1].copy())
        gate.wait()
        stall(lambda: bench.store.read(last).result(), gate, clock)
        error = writing.exception()
        assert isinstance(error, StorageError) and error.errno == ETIMEDOUT
        recover(bench, gate)
    bench.expect_works()


def test_a_store_whose_drive_stalls_is_closed_in_time_and_its_threads_end(
    make: Make, clock: Clock
) -> None:
    bench, gate = make(stall_seconds=STALL_SECONDS), Gate()
    bench.fill()
    with bench.layer.broken(Rule("preadv", gate)):
        stall(bench.read, gate, clock)
        in_thread(bench.store.close).result(SECONDS_TO_WAIT)
        gate.open()
        eventually(lambda: not threads_of(bench.folder))
    make().expect_works()


def test_memory_changed_after_a_stall_is_not_taken_for_what_was_written(
    tmp_nvme: Path, make: Make, clock: Clock
) -> None:
    """The rest of what stalled would be written from memory that has another use."""
    save_profile(Profile(block_bytes=64 * 1024), tmp_nvme)
    bench, gate = make("large", stall_seconds=STALL_SECONDS), Gate()
    bench.fill()
    memory = bench.new.copy()
    with bench.layer.broken(Rule("pwritev", gate, path="*/c.1.0")):
        stall(lambda: bench.store.write(ARRAY, memory).result(), gate, clock)
        memory[:] = 0
        recover(bench, gate)
    bench.expect_one_of(bench.old, bench.new)
    bench.expect_works()


@pytest.mark.parametrize(("verb", "call"), [("read", "preadv"), ("write", "pwritev")])
def test_a_request_that_failed_ends_when_nothing_uses_its_memory(
    make: Make, verb: str, call: str
) -> None:
    bench, gate, is_done = make("large"), Gate(), Event()
    bench.fill()

    def fail_while_held(call: Call) -> Any:
        gate.wait()
        return fail(EIO)(call)

    held = Rule(call, gate, path="*/c.0.0")
    failing = Rule(call, fail_while_held, path="*/c.1.0")
    with bench.layer.broken(failing, held):
        if verb == "read":
            future = bench.store.read(ARRAY)
        else:
            future = bench.store.write(ARRAY, bench.new)
        future.add_done_callback(lambda _: is_done.set())
        gate.wait()
        assert not is_done.wait(0.05)
        gate.open()
        with pytest.raises(StorageError) as caught:
            future.result(SECONDS_TO_WAIT)
        assert caught.value.errno == EIO
    bench.expect_at_rest()


def test_one_of_two_drives_that_stalls_is_named(
    tmp_nvme: Path, make: Make, clock: Clock
) -> None:
    paths = [tmp_nvme / "a", tmp_nvme / "b"]
    bench, gate = make("large", paths=paths, stall_seconds=STALL_SECONDS), Gate()
    bench.fill()
    assert {chunk.parents[2] for chunk in bench.chunks} == set(paths)
    with bench.layer.broken(Rule("pwritev", gate, path=f"{paths[1]}/*")):
        error = stall(lambda: bench.write(bench.new), gate, clock)
        assert error.filename == str(paths[1])
        recover(bench, gate)
    bench.write(bench.new)
    bench.expect(bench.new)
