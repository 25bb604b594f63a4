"""Every call of the NVMe tier may fail: the error is named, or the bytes are right."""

import errno
import os
from collections.abc import Callable, Iterator
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
from typing import Any

import numpy as np
import pytest

from tests.robustness.faults import (
    Rule,
    delay,
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
    expect_at_rest,
    expect_named,
    expect_works,
    run,
)
from zinf.memory.storage_error import StorageError

Make = Callable[..., Bench]

# What can be refused to each verb: the call, and the errors it may name. The rows of
# one call differ by who raises: a drive, a quota, a limit of the process, permissions.
REFUSED = {
    "read": {
        "open": [EIO, EACCES, EMFILE],
        "stat": [EIO],
        "preadv": [EIO, EAGAIN],
    },
    "overwrite": {
        "open": [EIO, EACCES, EROFS],
        "stat": [EIO],
        "pwritev": [EIO, EAGAIN, EDQUOT],
    },
    "replace": {
        "open": [EIO, EMFILE],
        "allocate": [EIO, ENOSPC, EDQUOT],
        "pwritev": [EIO, ENOSPC, EDQUOT],
        "replace": [EIO, ENOSPC, EACCES],
    },
    "write row": {"open": [EIO], "stat": [EIO], "preadv": [EIO], "pwritev": [EIO]},
    "first write": {"open": [EROFS, EMFILE], "pwritev": [EIO, ENOSPC, EFBIG]},
    "create": {
        "open": [EIO, EACCES, EROFS, EMFILE],
        "allocate": [EIO, ENOSPC, EDQUOT, EFBIG],
    },
}
CALLS = {
    "read": "open preadv",
    "overwrite": "open pwritev",
    "replace": "open allocate pwritev replace",
    "write row": "open preadv pwritev",
    "first write": "open pwritev",
    "create": "open allocate",
}
# What does not matter, of transfers and of every call.
SLOW_OR_SHORT: dict[str, Rule] = {
    "in pieces of whole pages": Rule("preadv pwritev", move_at_most(3 * 4096)),
    "in pieces of odd length": Rule("preadv pwritev", move_at_most(5001)),
    "short once": Rule("preadv pwritev", move_at_most(17), times=1),
    "nothing twice": Rule("preadv pwritev", move_nothing, times=2),
    "slowly": Rule("open preadv pwritev allocate replace", delay(0.005)),
}
# Of the verbs whose writes are in place or not, and of reads.
TRANSFERRING = ["read", "overwrite", "replace", "write row", "first write"]


@pytest.fixture
def make(tmp_nvme: Path) -> Iterator[Make]:
    with benches(tmp_nvme) as make:
        yield make


def named_errors() -> Iterator[Any]:
    for verb, calls in REFUSED.items():
        for call, codes in calls.items():
            for code in codes:
                name = f"{verb}-{call}-{errno.errorcode[code]}"
                yield pytest.param(verb, call, code, id=name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("verb", "call", "code"), [*named_errors()])
def test_what_a_call_refuses_is_named_and_leaves_nothing(verb, call, code, size, make):
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    # Of the second chunk only: the first may be written, or skipped.
    error = run(bench, verb, Rule(call, fail(code), path="*/c.1.0*"))
    assert error is not None
    expect_named(error, verb, code, bench.folder)
    assert Path(error.filename).name in ("c.1.0", "c.1.0.new")
    if call in ("preadv", "pwritev", "allocate"):
        nbytes = bench.size.chunk_bytes
        if call != "allocate" and size == "large":
            nbytes -= nbytes % 4096  # What O_DIRECT moves of it.
        assert f"{os.strerror(code)}, at byte 0, of {nbytes:,} bytes asked" in str(
            error
        )
    expect_at_rest(bench, is_there=verb.run is not Bench.create)
    bench.expect_links()
    expect_works(bench, verb)
    bench.expect_links()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_close_that_fails_is_named_and_leaves_nothing_open(verb, size, make):
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    error = run(bench, verb, Rule("close", fail_after(EIO)))
    assert error is not None
    expect_named(error, verb, EIO, bench.folder)
    expect_at_rest(bench, is_there=verb.run is not Bench.create)
    bench.expect_links()
    expect_works(bench, verb)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("verb", ["overwrite", "replace", "first write"])
def test_a_drive_that_is_full_in_mid_write_is_named(verb, size, make):
    """Half of a chunk is written, then there is no more room."""
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    half = bench.size.chunk_bytes // 8192 * 4096 or bench.size.chunk_bytes // 2
    rules = (
        Rule("pwritev", fail(ENOSPC), when=lambda c: c.offset >= half),
        Rule("pwritev", move_at_most(half)),
    )
    error = run(bench, verb, *rules)
    assert error is not None
    expect_named(error, verb, ENOSPC, bench.folder)
    assert f"at byte {half:,}, of " in str(error)
    expect_at_rest(bench)
    bench.expect_links()
    bench.expect_one_of()
    expect_works(bench, verb)


@pytest.mark.parametrize("verb", ["replace", "write row", "read"])
@pytest.mark.parametrize("size", SIZES)
def test_what_failed_leaves_the_old_content_or_none(verb, size, make):
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    call = "preadv" if verb is VERBS["read"] else "pwritev"
    assert run(bench, verb, Rule(call, fail(EIO)))
    bench.expect_one_of(bench.old)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", ["open", "pwritev", "allocate", "replace"])
def test_a_write_that_failed_in_part_is_never_read_as_a_mixture(call, size, make):
    bench, verb = make(size), VERBS["replace"]
    verb.prepare(bench)
    assert run(bench, verb, Rule(call, fail(EIO), path="*/c.1.0*"))
    bench.expect_one_of(bench.old, bench.new)
    expect_works(bench, verb)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("verb", "call"), [(v, c) for v, calls in CALLS.items() for c in calls.split()]
)
def test_a_call_that_a_signal_interrupts_is_made_again(verb, call, size, make):
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    assert run(bench, verb, Rule(call, fail(EINTR), times=3)) is None
    expect_at_rest(bench)
    if verb.run is Bench.create:
        bench.write(bench.old)
    np.testing.assert_array_equal(bench.read(), verb.result(bench))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", SLOW_OR_SHORT)
@pytest.mark.parametrize("verb", TRANSFERRING)
def test_what_is_short_or_slow_is_finished(verb, fault, size, make):
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    assert run(bench, verb, SLOW_OR_SHORT[fault]) is None
    np.testing.assert_array_equal(bench.read(), verb.result(bench))
    expect_at_rest(bench)
    bench.expect_links()


@pytest.mark.parametrize("verb", TRANSFERRING)
def test_a_byte_at_a_time_is_enough_for_the_page_cache(verb, make):
    bench, verb = make("small"), VERBS[verb]
    verb.prepare(bench)
    assert run(bench, verb, Rule("preadv pwritev", move_at_most(1))) is None
    np.testing.assert_array_equal(bench.read(), verb.result(bench))


@pytest.mark.parametrize(
    ("size", "nbytes"), [("small", 0), ("large", 0), ("large", 1), ("large", 4095)]
)
@pytest.mark.parametrize("verb", TRANSFERRING)
def test_a_transfer_that_does_not_come_on_is_given_up(verb, size, nbytes, make):
    """O_DIRECT goes on at a page only, so less than that is nothing."""
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    deed = move_at_most(nbytes) if nbytes else move_nothing
    error = run(bench, verb, Rule("preadv pwritev", deed))
    assert error is not None
    expect_named(error, verb, EIO, bench.folder)
    assert "moved nothing and named no error, at byte" in str(error)
    expect_at_rest(bench)
    expect_works(bench, verb)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_one_array_that_fails_leaves_the_others_alone(call, size, make):
    bench = make(size)
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
    bench.write(bench.new)
    np.testing.assert_array_equal(bench.read(), bench.new)


@pytest.mark.parametrize("call", ["open", "allocate"])
@pytest.mark.parametrize("size", SIZES)
def test_a_first_write_that_cannot_make_its_files_holds_nothing(call, size, make):
    bench = make(size)
    with bench.layer.broken(Rule(call, fail(ENOSPC))):
        with pytest.raises(StorageError, match="Free space on that drive"):
            bench.store.write(ARRAY, bench.new)
    expect_at_rest(bench, is_there=False)
    assert list((bench.folder / "arrays").iterdir()) == []
    bench.write(bench.new)
    np.testing.assert_array_equal(bench.read(), bench.new)
