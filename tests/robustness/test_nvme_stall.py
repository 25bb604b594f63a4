"""A drive that does not answer fails in time, and works again when it does."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from errno import EIO, ETIMEDOUT
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.clock import Clock, still
from tests.robustness.faults import SECONDS_TO_WAIT, Call, Gate, Rule, fail
from tests.robustness.faulty_store import (
    ARRAY,
    OTHER,
    SIZES,
    VERBS,
    Bench,
    benches,
    eventually,
    expect_at_rest,
    expect_works,
    threads_of,
)
from zinf.memory.nvme import Profile, drive, open_file, save_profile
from zinf.memory.storage_error import StorageError

Make = Callable[..., Bench]

STALL_SECONDS = 0.2

STALLS = [
    ("read", "open"),
    ("read", "stat"),
    ("read", "preadv"),
    ("overwrite", "open"),
    ("overwrite", "pwritev"),
    ("overwrite", "close"),
    ("replace", "allocate"),
    ("replace", "replace"),
    ("first write", "pwritev"),
    ("write row", "preadv"),
    ("create", "allocate"),
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


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


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


def expect_stall(function: Callable[[], Any], gate: Gate, clock: Clock) -> StorageError:
    """What it raises when the kernel has not answered for too long."""
    future = in_thread(function)
    gate.wait()
    clock.advance(1.5 * STALL_SECONDS)
    return stalled(future)


def stalled(future: Future[Any]) -> StorageError:
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
@pytest.mark.parametrize(("verb", "call"), STALLS)
def test_a_drive_that_stalls_fails_in_time_and_may_recover(
    verb, call, size, make, gate, clock
):
    bench, verb = make(size, stall_seconds=STALL_SECONDS), VERBS[verb]
    verb.prepare(bench)
    stall = Rule(call, gate, path="*/c.1.0*")
    with bench.layer.broken(stall):
        error = expect_stall(lambda: verb.run(bench), gate, clock)
        assert str(error).startswith(f"[Errno {ETIMEDOUT}] {verb.what}")
    recover(bench, gate)
    expect_at_rest(bench, is_there=verb.run is not Bench.create)
    bench.expect_links()
    if verb.run is not Bench.create:
        bench.expect_one_of(bench.old, bench.new)
    expect_works(bench, verb)
    bench.expect_links()


def test_all_that_is_asked_of_a_drive_that_stalls_fails_at_once(make, gate, clock):
    bench = make(stall_seconds=STALL_SECONDS)
    bench.fill()
    bench.store.write(OTHER, bench.new).result()
    with bench.layer.broken(Rule("pwritev", gate, path="*/c.1.0")):
        expect_stall(lambda: bench.write(bench.new), gate, clock)
        # The clock stands still: nothing is waited for.
        stalled(in_thread(lambda: bench.store.write(OTHER, bench.old).result()))
    recover(bench, gate)
    bench.store.write(OTHER, bench.old).result()
    np.testing.assert_array_equal(bench.store.read(OTHER).result(), bench.old)
    bench.store.free(OTHER)
    expect_works(bench, VERBS["overwrite"])


@pytest.mark.parametrize("size", SIZES)
def test_rows_beside_a_write_that_stalls_fail_in_time(size, make, gate, clock):
    bench = make(size, stall_seconds=STALL_SECONDS)
    bench.fill()
    row, last = (
        replace(ARRAY, rows=(r, r + 1)) for r in (bench.size.row, bench.size.row + 1)
    )
    with bench.layer.broken(Rule("pwritev", gate)):
        writing = bench.store.write(row, bench.new[: bench.size.shape[0] // 2][:1])
        gate.wait()
        expect_stall(lambda: bench.store.read(last).result(), gate, clock)
        assert writing.exception().errno == ETIMEDOUT
    recover(bench, gate)
    expect_works(bench, VERBS["overwrite"])


def test_a_small_read_whose_file_cannot_be_opened_fails_in_time(make, gate, clock):
    bench = make(stall_seconds=STALL_SECONDS)
    bench.fill()
    with bench.layer.broken(Rule("open", gate)):
        expect_stall(bench.read, gate, clock)


def test_a_store_whose_drive_stalls_is_closed_in_time_and_its_threads_end(
    make, gate, clock
):
    bench = make(stall_seconds=STALL_SECONDS)
    bench.fill()
    with bench.layer.broken(Rule("preadv", gate)):
        expect_stall(bench.read, gate, clock)
        in_thread(bench.store.close).result(SECONDS_TO_WAIT)
        gate.open()
        eventually(lambda: not threads_of(bench.folder))
    expect_works(make(), VERBS["create"])


def test_memory_changed_after_a_stall_is_not_taken_for_what_was_written(
    tmp_nvme, make, gate, clock
):
    """The rest of what stalled would be written from memory that has another use."""
    save_profile(Profile(block_bytes=64 * 1024), tmp_nvme)
    bench = make("large", stall_seconds=STALL_SECONDS)
    bench.fill()
    memory = bench.new.copy()
    with bench.layer.broken(Rule("pwritev", gate, path="*/c.1.0")):
        expect_stall(lambda: bench.store.write(ARRAY, memory).result(), gate, clock)
        memory[:] = 0
        recover(bench, gate)
    bench.expect_one_of(bench.old, bench.new)
    expect_works(bench, VERBS["overwrite"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("verb", "call"), [("read", "preadv"), ("write", "pwritev")])
def test_a_request_that_failed_ends_when_nothing_uses_its_memory(
    verb, call, size, make, gate
):
    bench = make(size)
    bench.fill()
    is_done = Event()

    def fail_while_held(call: Call) -> Any:
        gate.wait()
        return fail(EIO)(call)

    held = Rule(call, gate, path="*/c.0.0")
    failing = Rule(call, fail_while_held, path="*/c.1.0")
    with bench.layer.broken(failing, held):
        if verb == "read":
            future = in_thread(bench.read)
        else:
            future = bench.store.write(ARRAY, bench.new)
        future.add_done_callback(lambda _: is_done.set())
        gate.wait()
        assert not is_done.wait(0.05)
        gate.open()
        with pytest.raises(StorageError) as caught:
            future.result(SECONDS_TO_WAIT)
        assert caught.value.errno == EIO
    expect_at_rest(bench)
    expect_works(bench, VERBS["overwrite"])


def test_one_of_two_drives_that_stalls_is_named(tmp_nvme, make, gate, clock):
    paths = [tmp_nvme / "a", tmp_nvme / "b"]
    bench = make("large", paths=paths, stall_seconds=STALL_SECONDS)
    bench.fill()
    homes = {chunk.parent.parent.parent for chunk in bench.chunks}
    assert homes == set(paths)
    with bench.layer.broken(Rule("pwritev", gate, path=f"{paths[1]}/*")):
        error = expect_stall(lambda: bench.write(bench.new), gate, clock)
        assert error.filename == str(paths[1])
    recover(bench, gate)
    expect_works(bench, VERBS["overwrite"])
