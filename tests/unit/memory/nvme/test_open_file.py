"""One open file: ranges move whole, past the page cache or through it, or fail."""

import errno
import os
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.robustness.faults import (
    Call,
    Rule,
    fail,
    fail_after,
    go_on,
    move_at_most,
    move_nothing,
    open_files,
)
from tests.unit.memory.nvme.conftest import BLOCK_BYTES
from zinf.core.memory import StorageError
from zinf.core.memory.host.aligned import aligned_empty
from zinf.core.memory.nvme.open_file import (
    DIRECT_FROM_BYTES,
    MAX_STANDSTILLS,
    PAGE_BYTES,
    STAGING_BYTES,
    Mover,
    OpenFile,
)

LARGE = DIRECT_FROM_BYTES + 3 * PAGE_BYTES + 17
SIZES = [0, 1, DIRECT_FROM_BYTES - 1, DIRECT_FROM_BYTES, LARGE]
# Where a range begins in the file, and how far beyond a page its memory does.
PLACES = [(0, 0), (0, 64), (1, 1), (PAGE_BYTES - 1, 0), (3 * PAGE_BYTES + 5, 64)]


def memory_at(nbytes: int, beyond_page: int = 0) -> np.ndarray:
    """Memory that begins so many bytes beyond a page boundary."""
    pages = aligned_empty((max(2**20, nbytes + PAGE_BYTES),), np.uint8)
    return pages[beyond_page : beyond_page + nbytes]


def random_bytes(nbytes: int, beyond_page: int = 0) -> np.ndarray:
    memory = memory_at(nbytes, beyond_page)
    memory[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return memory


@pytest.fixture
def path(tmp_nvme: Path) -> Path:
    """A file of LARGE and ten pages."""
    path = tmp_nvme / "file"
    path.write_bytes(random_bytes(LARGE + 10 * PAGE_BYTES).tobytes())
    return path


@pytest.fixture
def direct(layer) -> Mover:
    return Mover(layer.system, BLOCK_BYTES, is_direct=True)


def open_(mover: Mover, path: Path) -> OpenFile:
    mover.what = "Cannot move it"
    return mover.open(path, os.O_RDWR)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_range_moves_whole_and_direct_requests_are_aligned(
    mover, path, layer, nbytes
):
    """Each part is handed over when read, and before written, for a checksum."""
    expected = bytearray(path.read_bytes())
    for number, (offset, beyond_page) in enumerate(PLACES):
        layer.transfers.clear()
        value = random_bytes(nbytes, beyond_page)
        value ^= number + 1
        old = bytes(expected)
        expected[offset : offset + nbytes] = value.tobytes()
        found, seen = memory_at(nbytes, PAGE_BYTES - beyond_page), []

        def is_not_written_yet(part, offset=offset, seen=seen, old=old):
            begin = offset + sum(map(len, seen))
            assert path.read_bytes()[begin:].startswith(old[begin : begin + part.size])
            seen.append(part.tobytes())

        with open_(mover, path) as file:
            file.write(offset, value, is_not_written_yet)
            assert path.read_bytes() == expected
            assert b"".join(seen) == value.tobytes()
            seen.clear()
            file.read(offset, found, lambda part, seen=seen: seen.append(part.copy()))
        np.testing.assert_array_equal(found, value)
        assert b"".join(seen) == value.tobytes()
        for t in layer.transfers:
            if t.name == "pwritev" and beyond_page == offset % PAGE_BYTES:
                # Memory that lies like the file is not copied.
                assert t.address == value.ctypes.data + t.offset - offset
            if t.is_direct:
                assert t.offset % PAGE_BYTES == t.nbytes % PAGE_BYTES == 0
                assert t.address % PAGE_BYTES == 0 and t.nbytes <= BLOCK_BYTES
        # Twice less than a page at either end, or twice everything.
        cached_bytes = sum(t.nbytes for t in layer.transfers if not t.is_direct)
        if mover.is_direct and nbytes >= DIRECT_FROM_BYTES:
            ends = -offset % PAGE_BYTES + (offset + nbytes) % PAGE_BYTES
            assert cached_bytes == 2 * ends
        else:
            assert cached_bytes == 2 * nbytes


def test_other_memory_goes_through_one_buffer_that_bounds_a_request(path, layer):
    nbytes = 2 * STAGING_BYTES + PAGE_BYTES
    mover = Mover(layer.system, 16 * 2**20, is_direct=True)
    value, found = random_bytes(nbytes, 8), memory_at(nbytes, 16)
    with open_(mover, path) as file:
        file.write(0, value)
        file.read(0, found)
    np.testing.assert_array_equal(found, value)
    assert len({transfer.address for transfer in layer.transfers}) == 1
    assert max(transfer.nbytes for transfer in layer.transfers) == STAGING_BYTES


@pytest.mark.parametrize(("nbytes", "moved"), [(100, 0), (LARGE, 0), (LARGE, 4095)])
def test_a_transfer_is_given_up_after_three_calls_without_progress(
    path, direct, layer, nbytes, moved
):
    """O_DIRECT goes on at a page only, so less than a page is nothing."""
    deed = move_at_most(moved) if moved else move_nothing

    def move(verb, num_standstills):
        layer.transfers.clear()
        with layer.broken(Rule("preadv pwritev", deed, times=num_standstills)):
            with open_(direct, path) as file:
                getattr(file, verb)(0, random_bytes(nbytes))

    for verb in ("read", "write"):
        move(verb, MAX_STANDSTILLS - 1)
        with pytest.raises(StorageError, match="moved nothing.*at byte 0, of") as error:
            move(verb, inf)
        assert (error.value.errno, error.value.filename) == (errno.EIO, str(path))
        assert len(layer.transfers) == MAX_STANDSTILLS


@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_a_file_that_ends_before_is_an_error_that_says_where(mover, path, nbytes):
    size = path.stat().st_size
    with open_(mover, path) as file:
        file.read(size - nbytes, memory_at(nbytes))
        # A direct request ends at the last page that it could begin with.
        place = rf"at byte ({size:,}|{size - size % PAGE_BYTES:,}), of"
        message = f"the file has only {size:,} bytes, {place} .* asked"
        with pytest.raises(StorageError, match=message) as error:
            file.read(size - nbytes + 1, memory_at(nbytes))
    assert error.value.errno == errno.ENODATA


@pytest.mark.parametrize(
    ("call", "verb", "arguments", "place"),
    [
        ("preadv", "read", (10, 200), ", at byte 10, of 200 bytes asked"),
        ("pwritev", "write", (10, 200), ", at byte 10, of 200 bytes asked"),
        ("allocate", "allocate", (200,), ", at byte 0, of 200 bytes asked"),
        ("stat", "stat", (), ""),
        ("sync", "sync", (), ""),
        ("toggle_direct", "read", (0, LARGE), ""),
    ],
)
def test_an_error_names_file_place_and_number(
    path, direct, layer, call, verb, arguments, place
):
    if verb in ("read", "write"):
        arguments = arguments[0], random_bytes(arguments[1])
    with open_(direct, path) as file, layer.broken(Rule(call, fail(errno.EIO))):
        with pytest.raises(StorageError) as error:
            getattr(file, verb)(*arguments)
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(path))
    assert f"Cannot move it: Input/output error{place}. " in str(error.value)


def test_a_drive_can_see_since_when_each_call_is_under_way(path, direct, layer):
    busy: dict[str, bool] = {}

    def look(call: Call) -> Any:
        busy[call.name] = direct.busy_since is not None
        return go_on(call)

    names = "open close preadv pwritev allocate stat toggle_direct sync replace unlink"
    with layer.broken(Rule(names, look)):
        with open_(direct, path) as file:
            file.allocate(LARGE)
            file.write(0, random_bytes(LARGE))
            file.read(0, memory_at(LARGE))
            file.stat(), file.sync()
        direct.replace(path, path.with_name("new"))
        for _ in range(2):
            direct.discard(path.with_name("new"))
    assert busy == dict.fromkeys(names.split(), True)
    assert direct.busy_since is None and os.listdir(path.parent) == []


def test_every_descriptor_is_closed_even_if_that_fails(mover, path, tmp_nvme, layer):
    file = open_(mover, path)
    file.read(3, memory_at(LARGE))
    assert len(open_files(tmp_nvme)) == 1
    with layer.broken(Rule("close", fail_after(errno.EIO))):
        with pytest.raises(StorageError, match="Input/output error"):
            file.close()
    assert open_files(tmp_nvme) == []
    file.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_what_nobody_waits_for_any_more_is_not_begun(mover, path, layer, verb):
    mover.is_wanted = lambda: len(layer.transfers) < 2
    short = Rule("preadv pwritev", move_at_most(PAGE_BYTES))
    with layer.broken(short), open_(mover, path) as file:
        with pytest.raises(StorageError) as error:
            getattr(file, verb)(0, random_bytes(LARGE))
    assert error.value.errno == errno.ETIMEDOUT
    assert len(layer.transfers) == 2


def test_reads_of_what_is_cached_only_say_so_to_the_kernel(path, layer):
    mover = Mover(layer.system, BLOCK_BYTES, is_direct=False, only_cached=True)
    with layer.broken(Rule("preadv", fail(errno.EAGAIN)), is_cached=True):
        with open_(mover, path) as file, pytest.raises(StorageError) as error:
            file.read(0, memory_at(100))
    assert error.value.errno == errno.EAGAIN
    assert [transfer.flags for transfer in layer.transfers] == [(os.RWF_NOWAIT,)]
