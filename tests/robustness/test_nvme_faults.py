"""Every call of the NVMe tier may fail: the error is named, or the bytes are right."""

import errno
import os
import resource
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from errno import (
    EACCES,
    EAGAIN,
    EDQUOT,
    EFBIG,
    EINTR,
    EIO,
    EMFILE,
    ENOSPC,
    EROFS,
)
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from tests.golden import Golden
from tests.robustness.faults import (
    Gate,
    Rule,
    before,
    delay,
    eventually,
    fail,
    fail_after,
    move_at_most,
    move_nothing,
)
from tests.robustness.faulty_store import (
    ARRAY,
    OTHER,
    SIZES,
    VERBS,
    Bench,
    benches,
    run,
)
from zinf.memory.nvme import Profile, save_profile
from zinf.memory.storage_error import StorageError

Make = Callable[..., Bench]

# What can be refused to each verb: the call, and the errors that it may name.
REFUSED = {
    "create": {
        "open": [EIO, EACCES, EROFS, EMFILE],
        "allocate": [EIO, ENOSPC, EDQUOT, EFBIG],
        "close": [EIO],
    },
    "first write": {"open": [EROFS], "pwritev": [ENOSPC, EFBIG], "close": [EIO]},
    "overwrite": {
        "open": [EACCES],
        "stat": [EIO],
        "pwritev": [EIO, EAGAIN, EDQUOT],
        "close": [EIO],
    },
    "replace": {
        "open": [EMFILE],
        "allocate": [EIO, ENOSPC],
        "pwritev": [EDQUOT],
        "replace": [EIO, ENOSPC, EACCES],
        "close": [EIO],
    },
    "write row": {"open": [EIO], "stat": [EIO], "preadv": [EIO], "pwritev": [EIO]},
    "read": {"open": [EIO], "stat": [EIO], "preadv": [EIO, EAGAIN], "close": [EIO]},
}
# What is finished all the same.
HARMLESS = {
    "in pieces of whole pages": Rule("preadv pwritev", move_at_most(3 * 4096)),
    "in pieces of odd length": Rule("preadv pwritev", move_at_most(5001)),
    "nothing twice": Rule("preadv pwritev", move_nothing, times=2),
    "slowly": Rule("open preadv pwritev allocate replace", delay(0.002)),
    "interrupted": Rule(
        "open preadv pwritev allocate replace stat close", fail(EINTR), times=3
    ),
}


@pytest.fixture
def make(tmp_nvme: Path) -> Iterator[Make]:
    with benches(tmp_nvme) as make:
        yield make


def test_what_a_call_refuses_is_named_and_leaves_nothing(
    make: Make, golden: Golden, tmp_nvme: Path
) -> None:
    lines, advice = [], {}
    for size in SIZES:
        bench = make(size)
        for name, call, code in [
            (verb, call, code)
            for verb, calls in REFUSED.items()
            for call, codes in calls.items()
            for code in codes
        ]:
            verb = VERBS[name]
            deed = fail_after(code) if call == "close" else fail(code)
            # Of the second chunk only: the first may be written, or skipped.
            error = run(bench, verb, Rule(call, deed, path="*/c.1.0*"))
            assert error is not None and error.errno == code
            file = Path(error.filename)
            assert file.parents[1] == tmp_nvme / "arrays"
            assert error.strerror.startswith(verb.what)
            found, _, advised = error.strerror.partition(". ")
            lines.append(f"{size}, {name}, {call}, {file.name}: {found}")
            assert advice.setdefault(errno.errorcode[code], advised) == advised
            bench.expect_at_rest(is_there=name != "create")
            if name in ("replace", "write row", "read"):
                bench.expect_one_of(bench.old, bench.new)
        bench.expect_works()
        bench.store.close()
    lines += ["", *(f"{name}: {advised}" for name, advised in sorted(advice.items()))]
    golden.check("errors_of_calls.txt", "\n".join(lines))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_short_slow_or_interrupted_is_finished(make: Make, size: str) -> None:
    bench = make(size)
    for rule in HARMLESS.values():
        for name, verb in VERBS.items():
            if name != "create" or "allocate" in rule.names:
                assert run(bench, verb, rule) is None
                bench.expect_at_rest()
                if name != "create":
                    bench.expect(verb.result(bench))


@pytest.mark.parametrize("size", SIZES)
def test_a_drive_that_is_full_in_mid_write_is_named(make: Make, size: str) -> None:
    """Half of a chunk is written, then there is no more room."""
    bench = make(size)
    half = bench.size.chunk_bytes // 8192 * 4096 or bench.size.chunk_bytes // 2
    rules = (
        Rule("pwritev", fail(ENOSPC), when=lambda c: c.offset >= half),
        Rule("pwritev", move_at_most(half)),
    )
    for name in ("first write", "overwrite", "replace"):
        error = run(bench, VERBS[name], *rules)
        assert error is not None and error.errno == ENOSPC
        assert f"at byte {half:,}, of " in str(error)
        with pytest.raises(StorageError, match="its last write failed"):
            bench.read()
        bench.expect_at_rest()


@pytest.mark.parametrize(
    ("size", "nbytes"), [("small", 0), ("large", 0), ("large", 1), ("large", 4095)]
)
def test_a_transfer_that_does_not_come_on_is_given_up(
    make: Make, size: str, nbytes: int
) -> None:
    """O_DIRECT goes on at a page only, so less than that is nothing."""
    bench = make(size)
    deed = move_at_most(nbytes) if nbytes else move_nothing
    for name in ("first write", "replace", "write row", "read"):
        error = run(bench, VERBS[name], Rule("preadv pwritev", deed))
        assert error is not None and error.errno == EIO
        assert "moved nothing and named no error, at byte" in str(error)
        bench.expect_at_rest()


@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_shrinks_while_it_is_read_is_named(make: Make, size: str) -> None:
    bench = make(size)
    shrink = before(lambda: os.truncate(bench.chunks[1], 5))
    error = run(bench, VERBS["read"], Rule("preadv", shrink, path="*/c.1.0"))
    assert error is not None
    assert "the file has only 5 bytes, at byte " in str(error)
    bench.expect_at_rest()
    bench.expect_works()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_one_array_that_fails_leaves_the_others_alone(make: Make, call: str) -> None:
    bench = make("large")
    bench.fill()
    bench.store.write(OTHER, bench.new.copy()).result()
    broken = Rule(call, fail(EIO), path=f"{bench.store.folder(ARRAY)}/*")
    with bench.layer.broken(broken):
        for value in (bench.old, bench.new):
            failing = (
                bench.store.read(ARRAY)
                if call == "preadv"
                else bench.store.write(ARRAY, bench.new)
            )
            bench.store.write(OTHER, value).result()
            np.testing.assert_array_equal(bench.store.read(OTHER).result(), value)
            with pytest.raises(StorageError):
                failing.result()


@pytest.mark.parametrize("call", ["open", "allocate"])
def test_a_first_write_that_cannot_make_its_files_holds_nothing(
    make: Make, call: str
) -> None:
    bench = make()
    with bench.layer.broken(Rule(call, fail(ENOSPC))):
        with pytest.raises(StorageError, match="Free space on that drive"):
            bench.store.write(ARRAY, bench.new)
    bench.expect_at_rest(is_there=False)
    assert list((bench.folder / "arrays").iterdir()) == []
    bench.write(bench.new)
    bench.expect(bench.new)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The kernel refuses larger files, as quotas and some file systems do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_the_kernel_thinks_too_large_is_named(make: Make) -> None:
    bench = make("large")
    for verb in (VERBS["create"], VERBS["overwrite"], VERBS["replace"]):
        verb.prepare(bench)
        with files_of_at_most(65536):
            with pytest.raises(StorageError, match="Free space on that") as error:
                verb.run(bench)
        assert error.value.errno == EFBIG
        bench.expect_at_rest(is_there=verb is not VERBS["create"])
    bench.expect_works()


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


def test_a_disk_that_is_really_full_is_named_and_may_be_emptied(
    small_disk: Path,
) -> None:
    with benches(small_disk / "nvme") as make:
        bench = make("large")
        VERBS["replace"].prepare(bench)
        with pytest.raises(StorageError, match="Free space on that drive") as caught:
            bench.store.write(OTHER, np.ones(2**18, np.float32))
        assert caught.value.errno == ENOSPC
        bench.expect_at_rest()
        (small_disk / "rest").write_bytes(bytes(2**18))
        with pytest.raises(StorageError) as caught:
            bench.write(bench.new)
        assert caught.value.errno == ENOSPC
        bench.expect_at_rest()
        (small_disk / "rest").unlink()
        for link in bench.links:
            link.unlink()
        bench.write(bench.new)
        bench.expect(bench.new)


def test_signals_during_transfers_change_nothing(make: Make) -> None:
    bench = make("large")
    bench.fill()
    got = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        with bench.layer.broken(Rule("preadv pwritev", delay(0.01))):
            for value in (bench.new, bench.old):
                writing = bench.store.write(ARRAY, value)
                for _ in range(10):
                    for thread in threading.enumerate():
                        if thread.name.startswith("nvme"):
                            assert thread.ident is not None
                            signal.pthread_kill(thread.ident, signal.SIGUSR1)
                    sleep(0.001)
                writing.result()
                bench.expect(value)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert got


def test_what_is_done_holds_no_memory(make: Make) -> None:
    bench = make("large")
    bench.fill()
    value = bench.new.copy()
    kept = [weakref.ref(value)]
    bench.store.write(ARRAY, value).result()
    kept.append(weakref.ref(bench.read()))
    del value
    eventually(lambda: all(memory() is None for memory in kept))


def test_a_callback_may_make_arrays_though_one_thread_moves_all(
    tmp_nvme: Path, make: Make
) -> None:
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
