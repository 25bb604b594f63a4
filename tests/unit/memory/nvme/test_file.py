"""A file without checksums: reads and writes of ranges, at once or later."""

import errno
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import sleep

import ml_dtypes
import numpy as np
import pytest

from tests.robustness.faults import (
    SECONDS_TO_WAIT,
    Gate,
    Rule,
    eventually,
    fail,
)
from zinf.core.memory import StorageError
from zinf.core.memory.nvme import Drive, File
from zinf.core.memory.nvme import file as module
from zinf.core.memory.nvme.open_file import DIRECT_FROM_BYTES

LARGE = DIRECT_FROM_BYTES + 70_001


@pytest.fixture
def path(tmp_nvme: Path) -> Path:
    return tmp_nvme / "file"


@pytest.fixture
def file(drive: Drive, path: Path) -> File:
    return File(drive, path)


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(3.5).reshape(()),
        np.arange(7).astype(ml_dtypes.bfloat16),
        np.zeros((0, 4), np.float32),
        np.arange(6, dtype=">f8"),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_any_contiguous_array_is_the_bytes_of_its_memory(file, path, value):
    assert file.write(value, 3) is None
    assert path.read_bytes()[3:] == value.tobytes()
    assert path.stat().st_mode & 0o777 == 0o600
    found = np.empty_like(value)
    assert file.read(found, 3) is found
    np.testing.assert_array_equal(found, value, strict=True)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_what_cannot_be_moved_is_refused(file, verb):
    value = np.zeros((4, 6), np.float32)[:, ::2]
    with pytest.raises(ValueError, match=r"float32\[4, 3\].*ascontiguousarray"):
        getattr(file, verb)(value)
    with pytest.raises(ValueError, match=f"Cannot {verb} at offset -1"):
        getattr(file, verb)(np.zeros(4), -1)
    value = np.zeros(4)
    value.flags.writeable = False
    file.write(value)
    with pytest.raises(ValueError, match="not writeable"):
        file.read(value)


def test_room_is_set_aside_at_once_and_what_is_there_stays(drive, path, layer):
    path.write_bytes(b"abc")
    File(drive, path, nbytes=100_000)
    assert path.stat().st_blocks * 512 >= 100_000
    assert path.read_bytes() == b"abc" + bytes(99_997)
    with layer.broken(Rule("allocate", fail(errno.ENOSPC))):
        message = "Cannot make file: .* at byte 0, of 1,000 bytes asked"
        with pytest.raises(StorageError, match=message) as error:
            File(drive, path, nbytes=1000)
    assert error.value.errno == errno.ENOSPC


def test_flush_waits_for_all_that_was_asked_even_if_some_fail(file, layer, path):
    gate = Gate()
    with ThreadPoolExecutor(1) as thread, layer.broken(Rule("pwritev", gate)):
        for _ in range(9):
            file.read_async(np.zeros(11, np.uint8), 100)
        for i in range(2):
            file.write_async(np.full(10, i, np.uint8), 10 * i)
        flushing = thread.submit(file.flush)
        with pytest.raises(TimeoutError):
            flushing.result(0.05)
        gate.open()
        with pytest.raises(StorageError, match="Cannot read 11 bytes"):
            flushing.result(SECONDS_TO_WAIT)
    assert path.read_bytes() == bytes(10) + bytes([1] * 10)


@pytest.mark.parametrize("delay", [0, 0.05])
def test_flush_raises_a_failure_once_however_late_callbacks_are(
    file, monkeypatch, delay
):
    real = Future._invoke_callbacks
    monkeypatch.setattr(
        Future, "_invoke_callbacks", lambda self: (sleep(delay), real(self))
    )
    file.write(np.zeros(10, np.uint8))
    for _ in range(3):
        file.read_async(np.zeros(11, np.uint8))
        good = file.read_async(np.zeros(10, np.uint8))
        file.read_async(np.zeros(11, np.uint8))
        with pytest.raises(StorageError, match="Cannot read 11 bytes.* only 10 "):
            file.flush()
        assert good.done()
        sleep(3 * delay)
        file.flush()
    # Who waits for a request itself has its failure.
    with pytest.raises(StorageError):
        file.read(np.zeros(11, np.uint8))
    file.flush()
    # The failure of a request that was done long before.
    failed = file.read_async(np.zeros(11, np.uint8))
    assert failed.exception() is not None
    eventually(lambda: not file._pending)
    with pytest.raises(StorageError):
        file.flush()


def test_an_error_is_raised_at_the_end_of_with(drive, path):
    with pytest.raises(StorageError, match="Cannot read 1 bytes"):
        with File(drive, path) as file:
            file.read_async(np.zeros(1, np.uint8))
    with pytest.raises(KeyError):
        with File(drive, path) as file:
            file.read_async(np.zeros(1, np.uint8))
            raise KeyError("comes first")


def test_flush_waits_for_the_drive_itself_if_asked_to(file, layer, path):
    synced: list[Path] = []
    noted = Rule("sync", lambda call: synced.append(call.path))
    with layer.broken(noted):
        file.write_async(np.zeros(10))
        file.flush()
        assert synced == []
        file.flush(durable=True)
    assert synced == [path]
    with layer.broken(Rule("sync", fail(errno.EIO))):
        with pytest.raises(StorageError, match="Cannot sync file"):
            file.flush(durable=True)


def test_asking_a_closed_drive_is_an_error_and_flush_does_not_hang(file, drive):
    drive.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(np.zeros(1, np.uint8))
    file.flush()


@pytest.mark.parametrize("offset", [0, 5])
def test_threads_share_one_large_request(file, layer, monkeypatch, path, offset):
    monkeypatch.setattr(module, "SPAN_BYTES", 4096)
    value, found = random_bytes(4 * 4096 + 5), np.zeros(4 * 4096 + 5, np.uint8)
    path.write_bytes(bytes(offset) + value.tobytes())
    gate = Gate()
    with layer.broken(Rule("preadv", gate)):
        reading = file.read_async(found, offset)
        gate.wait(3)
        gate.open()
        reading.result(SECONDS_TO_WAIT)
    np.testing.assert_array_equal(found, value)
    # Cut at multiples of a span in the file.
    cuts = [offset, *range(4096, 4 * 4096 + 1, 4096)]
    asked = {(t.offset, t.nbytes) for t in layer.transfers}
    stops = [*cuts[1:], offset + value.size]
    assert asked == {(a, b - a) for a, b in zip(cuts, stops, strict=True)}


def test_a_file_that_is_deleted_is_named_and_not_made_anew(file):
    file.path.unlink()
    for verb in ("read", "write"):
        message = f"Cannot {verb} 5,000 bytes: .* Something deleted files"
        with pytest.raises(StorageError, match=message) as error:
            getattr(file, verb)(np.zeros(5000, np.uint8))
        assert error.value.errno == errno.ENOENT
    assert not file.path.exists()
