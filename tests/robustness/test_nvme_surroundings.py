"""Limits of the process and the machine, other processes, and use without a store."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from errno import EBUSY, EDQUOT, EFBIG, EIO, ENODATA, ENOENT, ENOSPC
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from tests.robustness.faults import (
    BlockLayer,
    Gate,
    Rule,
    delay,
    fail,
    open_files,
    without_direct_requests,
)
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
    run,
    threads_of,
)
from zinf.memory import NvmeStore
from zinf.memory.nvme import Drive, File, Profile, save_profile
from zinf.memory.storage_error import StorageError

Make = Callable[..., Bench]

# Holds a store in mid-write until it is killed.
HOLD_STORE = """
import os, sys, threading
from pathlib import Path
import numpy as np
from zinf.memory.nvme import NvmeStore, System
from zinf.program import Role, ArrayId

def pwritev(*arguments):
    if (Path(sys.argv[1]) / "hold").exists():
        print(os.getpid(), flush=True)
        threading.Event().wait()
    return os.pwritev(*arguments)

store = NvmeStore([Path(sys.argv[1])], system=System(pwritev=pwritev))
for n in range(3):
    store.write(ArrayId(Role.PARAM, str(n)), np.zeros(99)).result()
(Path(sys.argv[1]) / "hold").touch()
store.write(ArrayId(Role.PARAM, "1"), np.zeros(99)).result()
"""


@pytest.fixture
def make(tmp_nvme: Path) -> Iterator[Make]:
    with benches(tmp_nvme) as make:
        yield make


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The kernel refuses larger files, as quotas and some file systems do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("verb", ["overwrite", "replace", "first write", "write row"])
def test_a_file_that_the_kernel_thinks_too_large_is_named(verb, size, make):
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    with files_of_at_most(32 if size == "small" else 65536):
        with pytest.raises(StorageError, match="Free space on that drive") as caught:
            verb.run(bench)
    assert caught.value.errno == EFBIG
    expect_at_rest(bench)
    bench.expect_links()
    expect_works(bench, verb)


def test_an_array_that_the_kernel_thinks_too_large_holds_nothing(make):
    bench = make("large")
    with files_of_at_most(65536):
        with pytest.raises(StorageError, match="at byte 0, of 264,080") as caught:
            bench.create()
    assert caught.value.errno == EFBIG
    expect_at_rest(bench, is_there=False)
    expect_works(bench, VERBS["create"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "zinf-test", str(disk)]
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system: {error}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full_is_named_and_may_be_emptied(small_disk):
    with benches(small_disk / "nvme") as make:
        bench = make("large")
        bench.fill()
        with pytest.raises(StorageError, match="Free space on that drive") as caught:
            bench.store.write(OTHER, np.ones(2**18, np.float32))
        assert caught.value.errno == ENOSPC
        expect_at_rest(bench)
        for link, chunk in zip(bench.links, bench.chunks, strict=True):
            os.link(chunk, link)
        (small_disk / "rest").write_bytes(bytes(2**18))
        with pytest.raises(StorageError) as caught:
            bench.write(bench.new)
        assert caught.value.errno == ENOSPC
        bench.expect_links()
        (small_disk / "rest").unlink()
        for link in bench.links:
            link.unlink()
        expect_works(bench, VERBS["overwrite"])


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", SIZES)
def test_a_file_system_without_direct_requests_is_enough(
    size, verb, tmp_nvme, caplog, monkeypatch
):
    monkeypatch.setattr(BlockLayer, "_choose", _refuse_direct)
    with benches(tmp_nvme) as make:
        bench, verb = make(size), VERBS[verb]
        assert "does not take O_DIRECT" in caplog.text
        verb.prepare(bench)
        bench.expect_links()
        expect_works(bench, verb)


def _refuse_direct(layer: BlockLayer, call):
    rule = without_direct_requests()
    return rule.deed if rule.is_about(call) else lambda c: c.go(*c.arguments)


@pytest.mark.parametrize("code", [ENOSPC, EDQUOT])
def test_what_has_no_room_on_one_drive_goes_to_the_other(code, tmp_nvme, make):
    paths = [tmp_nvme / "a", tmp_nvme / "b"]
    bench = make("large", paths=paths)
    full = Rule("allocate", fail(code), path=f"{paths[0]}/*")
    assert run(bench, VERBS["create"], full) is None
    assert all(paths[1] in chunk.parents for chunk in bench.chunks)
    bench.write(bench.old)
    np.testing.assert_array_equal(bench.read(), bench.old)
    assert open_files(tmp_nvme / "a" / "arrays") == []
    bench.store.free(ARRAY)
    bench.store.clear()
    expect_works(bench, VERBS["create"])


def test_two_full_drives_are_refused_and_keep_nothing(tmp_nvme, make):
    paths = [tmp_nvme / "a", tmp_nvme / "b"]
    bench = make("large", paths=paths)
    error = run(bench, VERBS["create"], Rule("allocate", fail(ENOSPC)))
    assert error is not None
    assert error.errno == ENOSPC
    assert [list((path / "arrays").iterdir()) for path in paths] == [[], []]
    expect_at_rest(bench, is_there=False)
    expect_works(bench, VERBS["create"])


@pytest.mark.parametrize("size", SIZES)
def test_signals_during_transfers_change_nothing(size, make):
    bench = make(size)
    bench.fill()
    got = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        with bench.layer.broken(Rule("preadv pwritev", delay(0.01))):
            for value in (bench.new, bench.old):
                writing = bench.store.write(ARRAY, value)
                _shower()
                writing.result()
                np.testing.assert_array_equal(bench.read(), value)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert got
    expect_works(bench, VERBS["overwrite"])


def _shower() -> None:
    """Signals to every thread that moves bytes."""
    for _ in range(10):
        for thread in threading.enumerate():
            if thread.name.startswith("nvme") and thread.ident is not None:
                signal.pthread_kill(thread.ident, signal.SIGUSR1)
        sleep(0.001)


def test_a_process_that_was_killed_in_mid_write_leaves_nothing_that_matters(tmp_nvme):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_STORE, str(tmp_nvme)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        pid = holder.stdout.readline().strip()
        (tmp_nvme / "hold").unlink()
        assert pid == str(holder.pid)
        with pytest.raises(StorageError, match=rf"in use by process {pid}\b") as caught:
            NvmeStore([tmp_nvme])
        assert caught.value.errno == EBUSY
        assert len(list((tmp_nvme / "arrays").iterdir())) == 3
        holder.kill()
    (tmp_nvme / ".zinf-measuring").mkdir()
    (tmp_nvme / ".zinf-measuring" / "measured").touch()
    with benches(tmp_nvme) as make:
        bench = make()
        assert list((tmp_nvme / "arrays").iterdir()) == []
        assert list(tmp_nvme.glob(".zinf-*")) == []
        expect_works(bench, VERBS["create"])


def test_what_is_done_holds_no_memory(make):
    bench = make("large")
    bench.fill()
    value = bench.new.copy()
    kept = [weakref.ref(value)]
    bench.store.write(ARRAY, value).result()
    kept.append(weakref.ref(bench.read()))
    del value
    eventually(lambda: all(memory() is None for memory in kept))


def test_a_callback_may_make_arrays_though_one_thread_moves_all(tmp_nvme, make):
    save_profile(Profile(num_threads=1), tmp_nvme)
    bench = make()
    bench.fill()
    gate, made = Gate(), threading.Event()

    def make_another(_: Future) -> None:
        bench.store.write(OTHER, bench.new).add_done_callback(lambda _: made.set())

    with bench.layer.broken(Rule("pwritev", gate, path="*/c.0.0")):
        writing = bench.store.write(ARRAY, bench.new)
        writing.add_done_callback(make_another)
        gate.open()
        assert made.wait(5)
    np.testing.assert_array_equal(bench.store.read(OTHER).result(), bench.new)


@pytest.mark.parametrize("size", SIZES)
def test_a_read_that_meets_a_replacement_has_one_content_or_the_other(size, make):
    bench = make(size)
    bench.fill()
    with bench.layer.broken(Rule("preadv replace", delay(0.002))):
        for value in (bench.new, bench.old) * 3:
            reading = bench.store.read(ARRAY)
            bench.store.write(ARRAY, value).result()
            found = reading.result()
            half = bench.size.rows_per_chunk
            for part in (slice(0, half), slice(half, None)):
                assert any(
                    np.array_equal(found[part], one[part])
                    for one in (bench.old, bench.new)
                )
    expect_works(bench, VERBS["overwrite"])


# Below: `Drive` and `File`, which keep no checksums.


@pytest.fixture
def layer() -> BlockLayer:
    return BlockLayer()


@pytest.fixture
def file(tmp_nvme: Path, layer: BlockLayer) -> Iterator[File]:
    with Drive(tmp_nvme, system=layer.system) as drive:
        yield File(drive, tmp_nvme / "bytes", nbytes=2**20)
    assert threads_of(tmp_nvme) == []
    assert open_files(tmp_nvme) == []


CONTENT = np.random.default_rng(0).integers(0, 255, 2**20, np.uint8)


@pytest.mark.parametrize("nbytes", [999, 2**20])
@pytest.mark.parametrize(
    ("verb", "call", "code"),
    [
        ("read", "preadv", EIO),
        ("read", "open", errno.EMFILE),
        ("write", "pwritev", ENOSPC),
        ("write", "open", errno.EROFS),
        ("write", "close", EIO),
    ],
)
def test_a_request_of_a_file_names_what_failed(verb, call, code, nbytes, file, layer):
    file.write(CONTENT)
    memory = CONTENT[:nbytes].copy()
    with layer.broken(Rule(call, fail(code) if call != "close" else _close_badly)):
        with pytest.raises(
            StorageError, match=f"Cannot {verb} {nbytes:,} bytes: "
        ) as e:
            getattr(file, verb)(memory)
    assert e.value.errno == code
    assert e.value.filename == str(file.path)
    getattr(file, verb)(memory)
    np.testing.assert_array_equal(memory, CONTENT[:nbytes])


def _close_badly(call):
    call.go(*call.arguments)
    raise OSError(EIO, "on purpose")


@pytest.fixture
def late(monkeypatch) -> None:
    """Callbacks are called long after a future is done, and not just a moment."""
    real = Future._invoke_callbacks
    monkeypatch.setattr(
        Future, "_invoke_callbacks", lambda self: (sleep(0.05), real(self))
    )


@pytest.mark.usefixtures("late")
def test_flush_raises_what_failed_even_if_nobody_was_told_yet(file, layer):
    with layer.broken(Rule("pwritev", fail(EIO))):
        file.write_async(CONTENT)
        with pytest.raises(StorageError):
            file.flush()


@pytest.mark.usefixtures("late")
def test_flush_raises_nothing_twice(file, layer):
    with layer.broken(Rule("pwritev", fail(EIO))):
        file.write_async(CONTENT)
        with pytest.raises(StorageError):
            file.flush()
    eventually(lambda: not file._pending)
    file.flush()


def test_flush_raises_the_first_failure_once(file, layer):
    with layer.broken(Rule("pwritev", fail(EIO), times=1)):
        told: list[Future] = []
        for _ in range(4):
            file.write_async(CONTENT[:99]).add_done_callback(told.append)
        with pytest.raises(StorageError, match="Input/output error"):
            file.flush()
    eventually(lambda: len(told) == 4)
    assert sum(f.exception() is not None for f in told) == 1
    file.flush()


def test_flush_to_the_drive_itself_may_fail(file, layer):
    file.write(CONTENT)
    with layer.broken(Rule("sync", fail(EIO))):
        with pytest.raises(StorageError, match="Cannot sync bytes"):
            file.flush(durable=True)
    file.flush(durable=True)


def test_reads_beyond_the_end_of_a_file_are_named(file):
    file.write(CONTENT)
    with pytest.raises(StorageError, match="has only 1,048,576 bytes") as caught:
        file.read(np.empty(2**20, np.uint8), offset=100_000)
    assert caught.value.errno == ENODATA


def test_writes_that_do_not_come_on_are_no_missing_data(file, layer):
    with layer.broken(Rule("pwritev", lambda call: 0)):
        with pytest.raises(StorageError, match="moved nothing") as caught:
            file.write(CONTENT, offset=2**20)
    assert caught.value.errno == EIO


def test_a_file_that_is_deleted_is_named_and_not_made_anew(file):
    file.path.unlink()
    for ask in (file.read, file.write):
        with pytest.raises(StorageError, match="Something deleted files") as caught:
            ask(CONTENT.copy())
        assert caught.value.errno == ENOENT
    assert not file.path.exists()


def test_a_file_without_room_is_refused(tmp_nvme, layer):
    with Drive(tmp_nvme, system=layer.system) as drive:
        with layer.broken(Rule("allocate", fail(ENOSPC))):
            with pytest.raises(StorageError, match="Cannot make bytes") as caught:
                File(drive, tmp_nvme / "bytes", nbytes=2**20)
    assert caught.value.errno == ENOSPC
    assert "at byte 0, of 1,048,576 bytes asked" in str(caught.value)
