import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.unit.memory.nvme.conftest import (
    SECONDS_TO_WAIT,
    Gate,
    Kernel,
    open_files,
)
from zinf.memory import StorageError, aligned_empty
from zinf.memory.nvme import Drive, File, System
from zinf.memory.nvme import file as module
from zinf.memory.nvme.open_file import DIRECT_FROM_BYTES

LARGE = DIRECT_FROM_BYTES + 70_001


@pytest.fixture
def path(tmp_nvme: Path) -> Path:
    return tmp_nvme / "file"


@pytest.fixture
def file(drive: Drive, path: Path) -> File:
    return File(drive, path)


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [1, 4096, 70_001, LARGE])
@pytest.mark.parametrize("offset", [0, 4095, 123_457])
def test_byte_ranges_are_written_and_read_at_any_offset(
    file: File, path: Path, offset: int, nbytes: int
) -> None:
    before = random_bytes(offset + nbytes + 5000, seed=1)
    file.write(before)
    value = random_bytes(nbytes)
    assert file.write(value, offset) is None
    found = np.zeros(nbytes, np.uint8)
    assert file.read(found, offset) is found
    np.testing.assert_array_equal(found, value)
    before[offset : offset + nbytes] = value
    assert path.read_bytes() == before.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        np.float32(3.5).reshape(()),
        np.arange(12, dtype=np.int16).reshape(3, 4),
        np.arange(7).astype(ml_dtypes.bfloat16),
        np.array([True, False, True]),
        np.zeros((0, 4), np.float32),
        np.arange(6, dtype=">f8"),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_any_contiguous_array_is_the_bytes_of_its_memory(
    file: File, path: Path, value: np.ndarray
) -> None:
    file.write(value, 3)
    assert path.read_bytes()[3:] == value.tobytes()
    found = np.empty_like(value)
    assert file.read(found, 3) is found
    np.testing.assert_array_equal(found, value, strict=True)


def test_aligned_memory_is_moved_without_a_copy(
    file: File, kernel: Kernel, drive: Drive
) -> None:
    value = aligned_empty((2**20,), np.uint8)
    value[:] = 1
    file.write(value)
    file.read(value)
    assert len(kernel.transfers) == 2 * value.nbytes // drive.profile.block_bytes
    for transfer in kernel.transfers:
        assert transfer.address == value.ctypes.data + transfer.offset


@pytest.mark.parametrize("verb", ["read", "write"])
def test_memory_that_is_not_contiguous_is_refused(file: File, verb: str) -> None:
    value = np.zeros((4, 6), np.float32)[:, ::2]
    with pytest.raises(ValueError, match=r"float32\[4, 3\].*ascontiguousarray"):
        getattr(file, verb)(value)


def test_what_cannot_be_filled_is_refused(file: File) -> None:
    value = np.zeros(4)
    value.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        file.read(value)
    file.write(value)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_negative_offset_is_refused(file: File, verb: str) -> None:
    with pytest.raises(ValueError, match=f"Cannot {verb} at offset -1"):
        getattr(file, verb)(np.zeros(4), -1)


def test_reading_beyond_the_end_is_an_error(file: File, path: Path) -> None:
    file.write(np.zeros(10, np.uint8))
    with pytest.raises(StorageError, match="Cannot read 11 bytes.* only 10 ") as error:
        file.read(np.zeros(11, np.uint8))
    assert (error.value.errno, error.value.filename) == (errno.ENODATA, str(path))


def test_room_is_set_aside_at_once_and_what_is_there_stays(
    drive: Drive, path: Path
) -> None:
    path.write_bytes(b"abc")
    File(drive, path, nbytes=100_000)
    assert path.stat().st_size == 100_000
    assert path.stat().st_blocks * 512 >= 100_000
    assert path.read_bytes() == b"abc" + bytes(99_997)


def test_a_full_drive_shows_when_the_file_is_made(
    make_drive: Callable[..., Drive], kernel: Kernel, path: Path
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "whatever")

    drive = make_drive(system=kernel.system(allocate=full))
    with pytest.raises(StorageError, match="Cannot make file: .*1,000 bytes") as error:
        File(drive, path, nbytes=1000)
    assert error.value.errno == errno.ENOSPC


def test_only_this_user_can_read_the_file(file: File, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_callbacks_are_called_with_the_result(file: File) -> None:
    seen, done = [], Event()
    file.write(np.arange(10))
    into = np.zeros(10, np.int64)

    def note(future) -> None:
        seen.append(future.result())
        done.set()

    file.read_async(into).add_done_callback(note)
    assert done.wait(SECONDS_TO_WAIT)
    assert seen[0] is into and into[9] == 9


def test_a_callback_may_start_the_next_read(file: File) -> None:
    """Which is how copying, or swapping, overlaps with everything else."""
    value = random_bytes(40_000)
    file.write(value)
    buffer, found, done = np.zeros(10_000, np.uint8), [], Event()

    def next_part(future) -> None:
        found.append(future.result().tobytes())
        if len(found) == 4:
            done.set()
        else:
            start(len(found) * buffer.size)

    def start(offset: int) -> None:
        file.read_async(buffer, offset).add_done_callback(next_part)

    start(0)
    assert done.wait(SECONDS_TO_WAIT)
    assert b"".join(found) == value.tobytes()


def test_flush_waits_for_all_that_was_asked(
    make_drive: Callable[..., Drive], path: Path
) -> None:
    gate = Gate(os.pwritev)
    file = File(make_drive(system=System(pwritev=gate)), path)
    gate.shut()
    futures = [file.write_async(np.full(10, i, np.uint8), 10 * i) for i in range(9)]
    flushed = threading.Thread(target=file.flush)
    flushed.start()
    flushed.join(0.05)
    assert flushed.is_alive()
    gate.open()
    flushed.join(SECONDS_TO_WAIT)
    assert all(future.done() for future in futures)
    assert path.read_bytes() == b"".join(bytes([i] * 10) for i in range(9))


def test_flush_raises_an_error_and_that_once(file: File) -> None:
    file.write(np.zeros(10, np.uint8))
    for _ in range(20):
        file.read_async(np.zeros(11, np.uint8))
        good = file.read_async(np.zeros(10, np.uint8))
        file.read_async(np.zeros(11, np.uint8))
        with pytest.raises(StorageError, match="Cannot read 11 bytes"):
            file.flush()
        assert good.done()
        file.flush()


def test_an_error_is_raised_at_the_end_of_with(drive: Drive, path: Path) -> None:
    with pytest.raises(StorageError, match="Cannot read 1 bytes"):
        with File(drive, path) as file:
            file.read_async(np.zeros(1, np.uint8))
    with pytest.raises(KeyError):
        with File(drive, path) as file:
            file.read_async(np.zeros(1, np.uint8))
            raise KeyError("comes first")


@pytest.mark.parametrize("is_durable", [True, False])
def test_flush_waits_for_the_drive_itself_if_asked_to(
    make_drive: Callable[..., Drive], kernel: Kernel, path: Path, is_durable: bool
) -> None:
    synced = []
    system = kernel.system(
        sync=lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    file = File(make_drive(system=system), path)
    file.write_async(np.zeros(10))
    file.flush(durable=is_durable)
    assert synced == ([str(path)] if is_durable else [])


@pytest.mark.parametrize("offset", [0, 5])
def test_threads_share_one_large_request(
    make_drive: Callable[..., Drive],
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    offset: int,
) -> None:
    monkeypatch.setattr(module, "SPAN_BYTES", 4096)
    meet, calls = threading.Barrier(3), count()

    def preadv(*arguments: Any) -> int:
        if next(calls) < 3:
            meet.wait(SECONDS_TO_WAIT)
        return os.preadv(*arguments)

    value, found = random_bytes(4 * 4096 + 5), np.zeros(4 * 4096 + 5, np.uint8)
    path.write_bytes(bytes(offset) + value.tobytes())
    drive = make_drive(num_threads=3, system=System(preadv=preadv))
    File(drive, path).read(found, offset)
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    ("offset", "nbytes", "expected"),
    [
        (0, 0, []),
        (7, 0, []),
        (0, 10, [(0, 10)]),
        (0, 100, [(0, 100)]),
        (0, 101, [(0, 100), (100, 101)]),
        (99, 102, [(0, 1), (1, 101), (101, 102)]),
        (100, 200, [(0, 100), (100, 200)]),
        (350, 40, [(0, 40)]),
    ],
)
def test_a_range_is_cut_at_multiples_of_a_span_in_the_file(
    monkeypatch: pytest.MonkeyPatch, offset: int, nbytes: int, expected
) -> None:
    monkeypatch.setattr(module, "SPAN_BYTES", 100)
    assert module._spans(offset, nbytes) == expected


def test_many_threads_may_use_one_handle(file: File, path: Path) -> None:
    """Each has a part that shares its pages with the parts beside it."""
    nbytes, num_threads = 10_001, 8
    file.write(np.zeros(num_threads * nbytes, np.uint8))

    def work(thread: int) -> None:
        random, found = np.random.default_rng(thread), np.empty(nbytes, np.uint8)
        for _ in range(10):
            value = random.integers(0, 256, nbytes, np.uint8)
            file.write(value, thread * nbytes)
            file.read(found, thread * nbytes)
            np.testing.assert_array_equal(found, value)

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, range(num_threads)))


@pytest.mark.parametrize("is_aligned", [True, False])
def test_large_neighbours_that_share_a_page_lose_nothing(
    file: File, path: Path, is_aligned: bool
) -> None:
    nbytes = DIRECT_FROM_BYTES + (0 if is_aligned else 1234)
    for step in range(5):
        values = [random_bytes(nbytes, seed=10 * step + n) for n in range(4)]
        for number, value in enumerate(values):
            file.write_async(value, number * nbytes)
        file.flush()
        assert path.read_bytes() == b"".join(v.tobytes() for v in values)


def test_the_memory_of_what_is_done_is_not_kept(file: File) -> None:
    gc.collect()
    gc.disable()
    try:
        value = np.ones(LARGE, np.uint8).view(type("Weak", (np.ndarray,), {}))
        kept = weakref.ref(value)
        file.write(value)
        file.read(value)
        del value
        # The thread lets go of it a moment after the future is done.
        for _ in range(1000):
            if kept() is None:
                break
            Event().wait(0.005)
        assert kept() is None
    finally:
        gc.enable()


def test_no_descriptor_stays_open(file: File, tmp_nvme: Path) -> None:
    for _ in range(3):
        file.write(random_bytes(LARGE), 5)
        file.read(np.zeros(LARGE, np.uint8), 5)
    file.drive.flush()
    assert open_files(tmp_nvme) == []
