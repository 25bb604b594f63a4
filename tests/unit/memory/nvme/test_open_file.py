import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.memory.nvme.conftest import BLOCK_BYTES, Kernel, open_files
from zinf.memory import StorageError
from zinf.memory.aligned import aligned_empty
from zinf.memory.nvme import System
from zinf.memory.nvme.open_file import (
    DIRECT_FROM_BYTES,
    MAX_STANDSTILLS,
    PAGE_BYTES,
    STAGING_BYTES,
    Mover,
    OpenFile,
)

LARGE = DIRECT_FROM_BYTES + 3 * PAGE_BYTES + 17
SIZES = [0, 1, PAGE_BYTES, DIRECT_FROM_BYTES - 1, DIRECT_FROM_BYTES, LARGE]
# Where a range begins in the file, and how far beyond a page its memory does.
PLACES = [
    (offset, beyond_page)
    for offset in (0, 1, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 5)
    for beyond_page in (0, 1, 64)
]


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
    """A file of LARGE and then some."""
    path = tmp_nvme / "file"
    path.write_bytes(random_bytes(LARGE + 10 * PAGE_BYTES).tobytes())
    return path


def open_(mover: Mover, path: Path) -> OpenFile:
    mover.what = "Cannot move it"
    return mover.open(path, os.O_RDWR)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_range_is_written_and_read_and_nothing_else_is(
    mover: Mover, path: Path, nbytes: int
) -> None:
    expected = bytearray(path.read_bytes())
    for number, (offset, beyond_page) in enumerate(PLACES):
        value = random_bytes(nbytes, beyond_page)
        value ^= number + 1
        expected[offset : offset + nbytes] = value.tobytes()
        found = memory_at(nbytes, PAGE_BYTES - beyond_page)
        with open_(mover, path) as file:
            file.write(offset, value)
            assert path.read_bytes() == expected
            file.read(offset, found)
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("nbytes", SIZES)
def test_direct_requests_are_aligned_in_memory_and_in_the_file(
    mover: Mover, path: Path, kernel: Kernel, nbytes: int
) -> None:
    for offset, beyond_page in PLACES:
        kernel.transfers.clear()
        value = random_bytes(nbytes, beyond_page)
        with open_(mover, path) as file:
            file.write(offset, value)
            file.read(offset, value)
        for transfer in kernel.direct:
            assert transfer.offset % PAGE_BYTES == 0
            assert transfer.nbytes % PAGE_BYTES == 0
            assert transfer.address % PAGE_BYTES == 0
            assert transfer.nbytes <= BLOCK_BYTES
        # What is not direct is less than a page at either end.
        through_cache = sum(t.nbytes for t in kernel.transfers if not t.is_direct)
        if mover.is_direct and nbytes >= DIRECT_FROM_BYTES:
            assert through_cache < 2 * 2 * PAGE_BYTES
        else:
            assert through_cache == 2 * nbytes


def test_memory_that_lies_like_the_file_is_not_copied(
    mover: Mover, path: Path, kernel: Kernel
) -> None:
    offset, value = 100, random_bytes(LARGE, beyond_page=100)
    start = value.ctypes.data
    with open_(mover, path) as file:
        file.write(offset, value)
        file.read(offset, value)
    for transfer in kernel.transfers:
        assert transfer.address == start + transfer.offset - offset


def test_other_memory_goes_through_one_buffer_that_bounds_a_request(
    path: Path, tmp_nvme: Path
) -> None:
    kernel, nbytes = Kernel(), 2 * STAGING_BYTES + PAGE_BYTES
    mover = Mover(kernel.system(), 16 * 2**20, is_direct=True)
    value, found = random_bytes(nbytes, 8), memory_at(nbytes, 16)
    with open_(mover, path) as file:
        file.write(0, value)
        file.read(0, found)
    np.testing.assert_array_equal(found, value)
    assert len({transfer.address for transfer in kernel.transfers}) == 1
    assert max(transfer.nbytes for transfer in kernel.transfers) == STAGING_BYTES


# Short by pages, by parts of pages, and (through the cache only) by bytes.
@pytest.mark.parametrize("most_bytes", [PAGE_BYTES, 5000, 3 * PAGE_BYTES])
@pytest.mark.parametrize("offset", [0, 77])
def test_short_transfers_are_finished(
    mover: Mover, path: Path, kernel: Kernel, most_bytes: int, offset: int
) -> None:
    kernel.most_bytes = most_bytes
    value, found = random_bytes(LARGE), memory_at(LARGE)
    with open_(mover, path) as file:
        file.write(offset, value)
        file.read(offset, found)
    np.testing.assert_array_equal(found, value)
    assert path.read_bytes()[offset : offset + LARGE] == value.tobytes()
    assert all(t.offset % PAGE_BYTES == 0 for t in kernel.direct)


def test_a_byte_at_a_time_is_finished_too(mover: Mover, path: Path, kernel) -> None:
    kernel.most_bytes = 1
    found = memory_at(300)
    with open_(mover, path) as file:
        file.read(5, found)
    assert found.tobytes() == path.read_bytes()[5:305]


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("nbytes", [100, LARGE])
def test_a_kernel_that_moves_nothing_is_given_up(
    mover: Mover, path: Path, kernel: Kernel, verb: str, nbytes: int
) -> None:
    kernel.most_bytes = 0
    with open_(mover, path) as file:
        with pytest.raises(StorageError, match="moved nothing.*at byte 0, of") as error:
            getattr(file, verb)(0, random_bytes(nbytes))
    assert error.value.errno == errno.EIO
    assert error.value.filename == str(path)
    assert len(kernel.transfers) == MAX_STANDSTILLS


@pytest.mark.parametrize("nbytes", [1, 100, LARGE])
@pytest.mark.parametrize("short_by", [1, PAGE_BYTES, LARGE])
def test_a_file_that_ends_before_is_an_error_that_says_where(
    mover: Mover, path: Path, nbytes: int, short_by: int
) -> None:
    size = path.stat().st_size
    with open_(mover, path) as file:
        # A direct request ends at the last page that it could begin with.
        place = rf"at byte ({size:,}|{size - size % PAGE_BYTES:,}), of"
        message = f"the file has only {size:,} bytes, {place} .* asked"
        with pytest.raises(StorageError, match=message) as error:
            file.read(size - nbytes + min(nbytes, short_by), memory_at(nbytes))
    assert error.value.errno == errno.ENODATA


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_error_names_file_offset_length_and_number(
    mover: Mover, path: Path, verb: str
) -> None:
    def fail(descriptor: int, memory: Any, offset: int) -> int:
        raise OSError(errno.EIO, "whatever")

    mover.system = System(preadv=fail, pwritev=fail)
    with open_(mover, path) as file:
        with pytest.raises(StorageError) as error:
            getattr(file, verb)(10, random_bytes(200))
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(path))
    found = "Cannot move it: Input/output error, at byte 10, of 200 bytes asked"
    assert found in str(error.value)


def test_a_call_that_a_signal_interrupts_is_made_again(mover: Mover, path) -> None:
    calls = []

    def interrupted(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) % 3:
            raise InterruptedError
        return os.preadv(*arguments)

    mover.system = System(preadv=interrupted)
    found = memory_at(100)
    with open_(mover, path) as file:
        file.read(0, found)
    assert found.tobytes() == path.read_bytes()[:100]
    assert mover.busy_since is None


@pytest.mark.parametrize("beyond_page", [0, 64])
@pytest.mark.parametrize("offset", [0, 77])
def test_each_part_is_handed_over_once_and_in_order(
    mover: Mover, path: Path, offset: int, beyond_page: int
) -> None:
    """When it was read, and before it is written: so a checksum costs no pass more."""
    seen: list[bytes] = []
    value, found = random_bytes(LARGE, beyond_page), memory_at(LARGE, beyond_page)
    with open_(mover, path) as file:

        def sees_the_old(part: np.ndarray) -> None:
            done = sum(map(len, seen))
            now = path.read_bytes()[offset + done : offset + done + part.size]
            assert now == old[done : done + part.size]
            seen.append(part.tobytes())

        old = path.read_bytes()[offset:]
        file.write(offset, value ^ 1, sees_the_old)
        assert b"".join(seen) == (value ^ 1).tobytes()
        seen.clear()
        file.read(offset, found, lambda part: seen.append(part.tobytes()))
        assert b"".join(seen) == found.tobytes() == (value ^ 1).tobytes()


def test_a_missing_file_is_found_at_once(mover: Mover, tmp_nvme: Path) -> None:
    with pytest.raises(StorageError, match="Something deleted files") as error:
        open_(mover, tmp_nvme / "missing")
    assert error.value.errno == errno.ENOENT


def test_truncating_is_done_once_though_there_are_two_ways_in(
    mover: Mover, path: Path
) -> None:
    """A range has parts of both kinds, and the second open must not lose the first."""
    value = random_bytes(LARGE)
    with mover.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
        file.write(0, value)
    assert path.read_bytes() == value.tobytes()


def test_allocated_bytes_are_zeros_that_are_set_aside(
    mover: Mover, tmp_nvme: Path
) -> None:
    path = tmp_nvme / "new"
    with mover.open(path, os.O_RDWR | os.O_CREAT) as file:
        file.allocate(0)
        assert path.stat().st_size == 0
        file.allocate(LARGE)
        assert file.stat().st_size == LARGE
    assert path.stat().st_blocks * 512 >= LARGE
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == bytes(LARGE)


@pytest.mark.parametrize("call", ["allocate", "stat", "sync"])
def test_what_else_fails_names_the_file(mover: Mover, path: Path, call: str) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "whatever")

    mover.system = System(**{call: fail})
    with open_(mover, path) as file:
        with pytest.raises(StorageError, match="Cannot move it: No space.*Free space"):
            getattr(file, call)(*([LARGE] if call == "allocate" else []))


def test_every_descriptor_is_closed_even_if_that_fails(
    mover: Mover, path: Path, tmp_nvme: Path
) -> None:
    def close(descriptor: int) -> None:
        os.close(descriptor)
        raise OSError(errno.EIO, "whatever")

    mover.system = System(close=close)
    file = open_(mover, path)
    file.read(3, memory_at(LARGE))
    assert len(open_files(tmp_nvme)) == 1
    with pytest.raises(StorageError, match="Input/output error"):
        file.close()
    assert open_files(tmp_nvme) == []
    file.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_what_nobody_waits_for_any_more_is_not_begun(
    mover: Mover, path: Path, kernel: Kernel, verb: str
) -> None:
    mover.is_wanted = lambda: len(kernel.transfers) < 2
    with open_(mover, path) as file:
        with pytest.raises(StorageError) as error:
            kernel.most_bytes = PAGE_BYTES
            getattr(file, verb)(0, random_bytes(LARGE))
    assert error.value.errno == errno.ETIMEDOUT
    assert len(kernel.transfers) == 2


def test_reads_of_what_is_cached_only_say_so_to_the_kernel(path: Path) -> None:
    flags = []

    def preadv(descriptor: int, memory: Any, offset: int, *rest: int) -> int:
        flags.extend(rest)
        raise BlockingIOError(errno.EAGAIN, "not in the page cache")

    mover = Mover(System(preadv=preadv), BLOCK_BYTES, is_direct=False, only_cached=True)
    with open_(mover, path) as file:
        with pytest.raises(StorageError) as error:
            file.read(0, memory_at(100))
    assert error.value.errno == errno.EAGAIN
    assert flags == [os.RWF_NOWAIT]


def test_a_file_is_replaced_or_discarded_by_name(mover: Mover, path: Path) -> None:
    fresh = path.with_name("fresh")
    fresh.write_bytes(b"new")
    mover.replace(fresh, path)
    assert path.read_bytes() == b"new" and not fresh.exists()
    mover.discard(path)
    mover.discard(path)
    assert not path.exists()
    with pytest.raises(StorageError) as error:
        mover.replace(fresh, path)
    assert error.value.errno == errno.ENOENT
