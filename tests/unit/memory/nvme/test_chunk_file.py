import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.unit.memory.nvme.conftest import SECONDS_TO_WAIT, open_files
from zinf.memory import StorageError, aligned_empty
from zinf.memory.nvme import System
from zinf.memory.nvme.checksum import NUM_WINDOWS, STRIPE_BYTES, WINDOW_BYTES, Coverage
from zinf.memory.nvme.chunk_file import ChunkFile
from zinf.memory.nvme.open_file import DIRECT_FROM_BYTES, Mover

# Through the page cache, and past it.
SIZES = [100, DIRECT_FROM_BYTES + 1001]
PADDING = 96
MakeChunk = Callable[..., ChunkFile]


def value_of(chunk: ChunkFile, seed: int = 0) -> np.ndarray:
    value = aligned_empty((chunk.nbytes,), np.uint8)
    value[:] = np.random.default_rng(seed).integers(0, 256, chunk.nbytes, np.uint8)
    return value


def read(
    chunk: ChunkFile, mover: Mover, low: int = 0, high: int | None = None
) -> bytes:
    high = chunk.nbytes if high is None else high
    memory = aligned_empty((high - low,), np.uint8)
    chunk.read(low, high, memory, mover)
    return memory.tobytes()


def write(chunk: ChunkFile, mover: Mover, value: np.ndarray, low: int = 0) -> None:
    chunk.write(low, low + value.size, value, mover)


def flip(path: Path, byte: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 4]))


def failing_pwritev(*arguments: Any) -> int:
    raise OSError(errno.EIO, "whatever")


@pytest.fixture
def make_chunk(tmp_nvme: Path, mover: Mover) -> MakeChunk:
    def make(nbytes: int = 100, coverage: Coverage = "full", **kind: int) -> ChunkFile:
        kind = {"start": 0, "file_bytes": nbytes + PADDING} | kind
        chunk = ChunkFile(tmp_nvme / "c.0", nbytes=nbytes, coverage=coverage, **kind)
        chunk.allocate(mover)
        return chunk

    return make


@pytest.fixture(params=SIZES)
def chunk(request: pytest.FixtureRequest, make_chunk: MakeChunk) -> ChunkFile:
    return make_chunk(request.param)


@pytest.fixture
def filled(chunk: ChunkFile, mover: Mover) -> ChunkFile:
    write(chunk, mover, value_of(chunk))
    return chunk


def test_a_new_file_is_zeros_and_private(chunk: ChunkFile, mover: Mover) -> None:
    assert chunk.path.read_bytes() == bytes(chunk.file_bytes)
    assert chunk.path.stat().st_mode & 0o777 == 0o600
    assert read(chunk, mover) == bytes(chunk.nbytes)


def test_allocating_again_makes_zeros_of_what_was_there(
    filled: ChunkFile, mover: Mover
) -> None:
    filled.allocate(mover)
    assert filled.path.read_bytes() == bytes(filled.file_bytes)


def test_what_was_written_is_the_beginning_of_the_file(
    filled: ChunkFile, mover: Mover
) -> None:
    value = value_of(filled).tobytes()
    assert filled.path.read_bytes() == value + bytes(PADDING)
    assert read(filled, mover) == value


@pytest.mark.parametrize(("low", "high"), [(0, 1), (7, 60), (99, 100), (0, 99)])
def test_a_part_is_read_and_replaced_alone(
    filled: ChunkFile, mover: Mover, low: int, high: int
) -> None:
    expected = value_of(filled)
    assert read(filled, mover, low, high) == expected[low:high].tobytes()
    expected[low:high] ^= 0xFF
    write(filled, mover, expected[low:high], low)
    assert read(filled, mover) == expected.tobytes()


def test_it_is_overwritten_in_place_if_nothing_refers_to_it(
    filled: ChunkFile, mover: Mover
) -> None:
    before = filled.path.stat().st_ino
    write(filled, mover, value_of(filled, 1))
    assert filled.path.stat().st_ino == before
    assert read(filled, mover) == value_of(filled, 1).tobytes()


def test_a_hard_link_keeps_the_old_content(filled: ChunkFile, mover: Mover) -> None:
    link = filled.path.with_name("saved")
    os.link(filled.path, link)
    for seed in (1, 2):
        write(filled, mover, value_of(filled, seed))
        assert read(filled, mover) == value_of(filled, seed).tobytes()
    write(filled, mover, value_of(filled)[:5], 3)
    assert link.read_bytes() == value_of(filled).tobytes() + bytes(PADDING)
    assert filled.path.stat().st_nlink == link.stat().st_nlink == 1
    assert filled.path.stat().st_size == filled.file_bytes
    assert filled.path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(filled.path.parent)) == ["c.0", "saved"]


# Of whole pages, or none.
@pytest.mark.parametrize("chunk", [100, DIRECT_FROM_BYTES + 4096], indirect=True)
def test_a_read_under_way_sees_the_old_content_to_the_end(
    filled: ChunkFile, mover: Mover
) -> None:
    reached, may_go_on = Event(), Event()

    def held(*arguments: Any) -> int:
        reached.set()
        assert may_go_on.wait(SECONDS_TO_WAIT)
        return os.preadv(*arguments)

    def held_mover() -> Mover:
        system = System(preadv=held)
        return Mover(system, mover.block_bytes, is_direct=mover.is_direct)

    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(read, filled, held_mover())
        assert reached.wait(SECONDS_TO_WAIT)
        for seed in (1, 2):
            write(filled, mover, value_of(filled, seed))
        may_go_on.set()
        assert reading.result(SECONDS_TO_WAIT) == value_of(filled).tobytes()
    before = filled.path.stat().st_ino
    write(filled, mover, value_of(filled, 3))
    assert filled.path.stat().st_ino == before
    assert read(filled, mover) == value_of(filled, 3).tobytes()


def test_a_missing_file_fails_reads_and_parts_and_is_made_by_a_whole(
    filled: ChunkFile, mover: Mover
) -> None:
    filled.path.unlink()
    for call in (
        lambda: read(filled, mover),
        lambda: write(filled, mover, value_of(filled)[:5]),
    ):
        with pytest.raises(StorageError) as error:
            call()
        assert error.value.errno == errno.ENOENT
        assert not filled.path.exists()
    write(filled, mover, value_of(filled, 1))
    assert filled.path.read_bytes() == value_of(filled, 1).tobytes() + bytes(PADDING)
    assert read(filled, mover) == value_of(filled, 1).tobytes()


@pytest.mark.parametrize("by", [-100, -1, 1, 4096])
def test_a_file_of_another_size_fails_reads_and_parts_and_is_replaced_by_a_whole(
    filled: ChunkFile, mover: Mover, by: int
) -> None:
    size = filled.file_bytes + by
    os.truncate(filled.path, size)
    for call in (
        lambda: read(filled, mover, 3, 5),
        lambda: write(filled, mover, value_of(filled)[:5]),
    ):
        with pytest.raises(StorageError, match=f"has {size:,} bytes instead") as error:
            call()
        assert error.value.errno == errno.EIO
        assert error.value.filename == str(filled.path)
    write(filled, mover, value_of(filled, 1))
    assert read(filled, mover) == value_of(filled, 1).tobytes()


@pytest.mark.parametrize("byte", [0, 50, 99])
def test_a_flipped_bit_is_found_by_reads_and_by_writes_of_parts(
    filled: ChunkFile, mover: Mover, byte: int
) -> None:
    flip(filled.path, byte)
    for call in (
        lambda: read(filled, mover),
        lambda: read(filled, mover, 60, 61),
        lambda: write(filled, mover, value_of(filled)[:5], 7),
    ):
        message = f"checksum .* instead of .*{filled.nbytes:,} bytes.*damaged"
        with pytest.raises(StorageError, match=message) as error:
            call()
        assert error.value.errno == errno.EIO
        assert error.value.filename == str(filled.path)
    write(filled, mover, value_of(filled))
    assert read(filled, mover) == value_of(filled).tobytes()


def test_what_pads_a_file_is_nobodys(filled: ChunkFile, mover: Mover) -> None:
    flip(filled.path, filled.nbytes + 1)
    assert read(filled, mover) == value_of(filled).tobytes()


def test_without_checksums_other_content_is_read_as_it_is(
    make_chunk: MakeChunk, mover: Mover
) -> None:
    chunk = make_chunk(coverage="off")
    write(chunk, mover, value_of(chunk))
    flip(chunk.path, 10)
    expected = value_of(chunk)
    expected[10] ^= 4
    assert read(chunk, mover) == expected.tobytes()


def test_what_others_wrote_before_the_first_write_has_no_checksum(
    chunk: ChunkFile, mover: Mover
) -> None:
    flip(chunk.path, 10)
    assert read(chunk, mover)[10] == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", [0, 1, 5])
def test_a_byte_that_stays_wrong_is_found_within_a_few_sampled_writes(
    make_chunk: MakeChunk, mover: Mover, start: int
) -> None:
    nbytes = STRIPE_BYTES + 3 * WINDOW_BYTES
    chunk = make_chunk(nbytes, "sampled", start=start * nbytes)
    wrong, found = 2 * WINDOW_BYTES + 17, []
    for number in range(2 * NUM_WINDOWS):
        write(chunk, mover, value_of(chunk))
        flip(chunk.path, wrong)
        try:
            read(chunk, mover)
        except StorageError:
            found.append(number)
    assert len(found) == 2 and found[1] - found[0] == NUM_WINDOWS


def test_a_write_that_fails_in_place_leaves_what_cannot_be_read(
    filled: ChunkFile, mover: Mover
) -> None:
    healthy, mover.system = mover.system, System(pwritev=failing_pwritev)
    with pytest.raises(StorageError, match="Input/output error, at byte 0"):
        write(filled, mover, value_of(filled, 1))
    mover.system = healthy
    for call in (
        lambda: read(filled, mover),
        lambda: read(filled, mover, 0, 3),
        lambda: write(filled, mover, value_of(filled)[:5]),
    ):
        with pytest.raises(StorageError, match="the last write of this file failed"):
            call()
    write(filled, mover, value_of(filled, 2))
    assert read(filled, mover) == value_of(filled, 2).tobytes()


@pytest.mark.parametrize("call", ["pwritev", "allocate", "replace"])
def test_a_write_that_fails_elsewhere_leaves_the_old_content_and_no_file(
    filled: ChunkFile, mover: Mover, call: str
) -> None:
    os.link(filled.path, filled.path.with_name("saved"))
    healthy, mover.system = mover.system, System(**{call: failing_pwritev})
    with pytest.raises(StorageError, match="Input/output error"):
        write(filled, mover, value_of(filled, 1))
    mover.system = healthy
    assert read(filled, mover) == value_of(filled).tobytes()
    assert sorted(os.listdir(filled.path.parent)) == ["c.0", "saved"]


def test_forgetting_makes_it_as_if_it_was_never_written(
    filled: ChunkFile, mover: Mover
) -> None:
    flip(filled.path, 10)
    filled.forget()
    read(filled, mover)
    write(filled, mover, value_of(filled)[:5])
    assert read(filled, mover, 0, 5) == value_of(filled)[:5].tobytes()


def test_a_read_that_must_not_wait_does_not_wait_for_a_write(
    filled: ChunkFile, mover: Mover
) -> None:
    reached, may_go_on = Event(), Event()

    def held(*arguments: Any) -> int:
        reached.set()
        assert may_go_on.wait(SECONDS_TO_WAIT)
        return os.pwritev(*arguments)

    slow = Mover(System(pwritev=held), mover.block_bytes, is_direct=mover.is_direct)
    writing = Thread(target=write, args=(filled, slow, value_of(filled, 1)))
    writing.start()
    assert reached.wait(SECONDS_TO_WAIT)
    now = Mover(System(), mover.block_bytes, is_direct=False, only_cached=True)
    with pytest.raises(BlockingIOError):
        read(filled, now)
    may_go_on.set()
    writing.join(SECONDS_TO_WAIT)
    assert read(filled, mover) == value_of(filled, 1).tobytes()


@pytest.mark.parametrize("chunk", [100, DIRECT_FROM_BYTES + 4096], indirect=True)
def test_threads_find_one_content_or_the_other_never_a_mixture(
    filled: ChunkFile, tmp_nvme: Path, mover: Mover
) -> None:
    contents = [value_of(filled, seed) for seed in range(4)]
    allowed = {content.tobytes() for content in contents}

    def work(thread: int) -> None:
        own = Mover(System(), mover.block_bytes, is_direct=mover.is_direct)
        for _ in range(15):
            if thread % 2:
                write(filled, own, contents[thread // 2])
            else:
                assert read(filled, own) in allowed

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert os.listdir(tmp_nvme) == ["c.0"]
    assert open_files(tmp_nvme) == []
