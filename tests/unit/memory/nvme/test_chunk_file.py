"""A chunk file: what is read is what was written last, or an error says why not."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.robustness.faults import (
    SECONDS_TO_WAIT,
    BlockLayer,
    Deed,
    Gate,
    Rule,
    fail,
    flip_bit,
    misplace,
    open_files,
    pretend,
    read_zeros,
)
from zinf.memory import StorageError, aligned_empty
from zinf.memory.nvme.checksum import NUM_WINDOWS, STRIPE_BYTES, WINDOW_BYTES, Coverage
from zinf.memory.nvme.chunk_file import ChunkFile
from zinf.memory.nvme.open_file import DIRECT_FROM_BYTES, Mover

# Through the page cache, and past it.
SIZES = [100, DIRECT_FROM_BYTES + 1001]
PADDING = 96


@dataclass
class Bench:
    """A chunk file and the mover that reads and writes it."""

    chunk: ChunkFile
    mover: Mover

    def value(self, seed: int = 0) -> np.ndarray:
        """Content of the chunk that is another for each seed."""
        value = aligned_empty((self.chunk.nbytes,), np.uint8)
        value[:] = np.random.default_rng(seed).integers(0, 256, value.size, np.uint8)
        return value

    def read(self, low: int = 0, high: int | None = None) -> bytes:
        high = self.chunk.nbytes if high is None else high
        memory = aligned_empty((high - low,), np.uint8)
        self.chunk.read(low, high, memory, self.mover)
        return memory.tobytes()

    def write(self, seed: int = 0) -> None:
        self.write_part(self.value(seed), 0)

    def write_part(self, value: np.ndarray, low: int) -> None:
        self.chunk.write(low, low + value.size, value, self.mover)

    def expect(self, seed: int) -> None:
        assert self.read() == self.value(seed).tobytes()

    @property
    def path(self) -> Path:
        return self.chunk.path

    def flip(self, byte: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(byte)
            old = file.read(1)[0]
            file.seek(byte)
            file.write(bytes([old ^ 4]))

    def other(self) -> "Bench":
        """The same file, moved by another thread."""
        mover = Mover(
            self.mover.system, self.mover.block_bytes, is_direct=self.mover.is_direct
        )
        return Bench(self.chunk, mover)


@pytest.fixture
def make(tmp_nvme: Path, mover: Mover) -> Callable[..., Bench]:
    def make(
        nbytes: int = 100,
        coverage: Coverage = "full",
        start: int = 0,
        padding: int = PADDING,
    ) -> Bench:
        path, file_bytes = tmp_nvme / "c.0", nbytes + padding
        chunk = ChunkFile(
            path, start=start, nbytes=nbytes, file_bytes=file_bytes, coverage=coverage
        )
        chunk.allocate(mover)
        return Bench(chunk, mover)

    return make


@pytest.fixture(params=SIZES)
def filled(request: pytest.FixtureRequest, make: Callable[..., Bench]) -> Bench:
    """Holds `value(0)`."""
    bench = make(request.param)
    bench.write()
    return bench


def expect_damaged(bench: Bench, message: str, code: int = errno.EIO) -> None:
    """Reads and writes of parts fail; a write of the whole makes the file good."""
    for ask in (
        bench.read,
        lambda: bench.read(3, 5),
        lambda: bench.write_part(bench.value()[:5], 7),
    ):
        with pytest.raises(StorageError, match=message) as error:
            ask()
        assert error.value.errno == code
        assert error.value.filename == str(bench.path)
    bench.write(1)
    bench.expect(1)
    assert bench.path.stat().st_size == bench.chunk.file_bytes


def test_a_file_is_zeros_then_what_was_written_and_padding(
    make: Callable[..., Bench],
) -> None:
    bench = make()
    assert bench.path.read_bytes() == bytes(100 + PADDING)
    assert bench.path.stat().st_mode & 0o777 == 0o600
    bench.flip(10)  # Without a write of ours there is no checksum.
    assert bench.read()[10] == 4
    bench.write()
    assert bench.path.read_bytes() == bench.value().tobytes() + bytes(PADDING)
    bench.flip(100)  # Padding belongs to nobody.
    bench.expect(0)
    bench.chunk.allocate(bench.mover)
    assert bench.path.read_bytes() == bytes(100 + PADDING)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (7, 60), (0, 99), (99, 100)])
def test_a_part_is_read_and_replaced_alone(filled: Bench, low: int, high: int) -> None:
    expected = filled.value()
    assert filled.read(low, high) == expected[low:high].tobytes()
    expected[low:high] ^= 0xFF
    filled.write_part(expected[low:high], low)
    assert filled.read() == expected.tobytes()


def test_a_file_is_overwritten_in_place_until_it_is_linked(filled: Bench) -> None:
    node = filled.path.stat().st_ino
    filled.write(1)
    assert filled.path.stat().st_ino == node
    link = filled.path.with_name("saved")
    os.link(filled.path, link)
    for seed in (2, 3):
        filled.write(seed)
        filled.expect(seed)
    assert link.read_bytes() == filled.value(1).tobytes() + bytes(PADDING)
    assert filled.path.stat().st_ino != node
    assert filled.path.stat().st_nlink == link.stat().st_nlink == 1
    assert filled.path.stat().st_size == filled.chunk.file_bytes
    assert filled.path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(filled.path.parent)) == ["c.0", "saved"]


@pytest.mark.parametrize("coverage", ["off", "full"])
@pytest.mark.parametrize("nbytes", [100, DIRECT_FROM_BYTES + 4096])
def test_a_read_under_way_sees_the_old_content_to_the_end(
    make: Callable[..., Bench], layer: BlockLayer, nbytes: int, coverage: Coverage
) -> None:
    bench, gate = make(nbytes, coverage), Gate()
    bench.write()
    with ThreadPoolExecutor(1) as thread, layer.broken(Rule("preadv", gate)):
        reading = thread.submit(bench.other().read)
        gate.wait()
        for seed in (1, 2):
            bench.write(seed)
        gate.open()
        assert reading.result(SECONDS_TO_WAIT) == bench.value().tobytes()
    node = bench.path.stat().st_ino
    bench.write(3)
    assert bench.path.stat().st_ino == node
    bench.expect(3)


DAMAGES: dict[str, tuple[Callable[[Bench], object], int, str]] = {
    "missing": (lambda b: b.path.unlink(), errno.ENOENT, "Something deleted files"),
    "empty": (lambda b: os.truncate(b.path, 0), errno.EIO, "has 0 bytes instead of"),
    "too short": (
        lambda b: os.truncate(b.path, b.chunk.file_bytes - 1),
        errno.EIO,
        "bytes instead of",
    ),
    "too long": (
        lambda b: os.truncate(b.path, b.chunk.file_bytes + 1),
        errno.EIO,
        "bytes instead of",
    ),
    "first byte": (lambda b: b.flip(0), errno.EIO, "not what was written"),
    "last byte": (
        lambda b: b.flip(b.chunk.nbytes - 1),
        errno.EIO,
        r"checksum \w{16} instead of \w{16}, of [\d,]+ bytes from byte 0",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_was_changed_is_never_read(filled: Bench, damage: str) -> None:
    do, code, message = DAMAGES[damage]
    do(filled)
    is_missing = not filled.path.exists()
    with pytest.raises(StorageError):
        filled.read()
    assert filled.path.exists() != is_missing
    expect_damaged(filled, message, code)


LIES: dict[str, Deed] = {
    "writes nothing": pretend,
    "writes a wrong bit": flip_bit(7),
    "writes elsewhere": misplace,
}


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_drive_that_reports_success_and_did_not_write_is_found_out(
    filled: Bench, layer: BlockLayer, lie: str, is_linked: bool
) -> None:
    if is_linked:
        os.link(filled.path, filled.path.with_name("saved"))
    with layer.broken(Rule("pwritev", LIES[lie])):
        filled.write(1)
    if filled.path.stat().st_size == filled.chunk.file_bytes:
        expect_damaged(filled, "not what was written")
    else:
        expect_damaged(filled, "bytes instead of")


@pytest.mark.parametrize("deed", [flip_bit(11), read_zeros, misplace])
def test_a_drive_that_reads_other_bytes_is_found_out(
    filled: Bench, layer: BlockLayer, deed: Deed
) -> None:
    with layer.broken(Rule("preadv", deed)):
        with pytest.raises(StorageError, match="not what was written"):
            filled.read()
    filled.expect(0)


def test_a_rename_that_was_none_is_found_out(filled: Bench, layer: BlockLayer) -> None:
    os.link(filled.path, filled.path.with_name("saved"))
    with layer.broken(Rule("replace", pretend)):
        filled.write(1)
    expect_damaged(filled, "not what was written")


def test_without_checksums_only_sizes_are_compared(make: Callable[..., Bench]) -> None:
    bench = make(coverage="off")
    bench.write()
    bench.flip(10)
    expected = bench.value()
    expected[10] ^= 4
    assert bench.read() == expected.tobytes()
    os.truncate(bench.path, 99)
    expect_damaged(bench, "has 99 bytes instead of 196")


@pytest.mark.parametrize("start", [0, 5])
def test_a_byte_that_stays_wrong_is_found_once_in_16_sampled_writes(
    make: Callable[..., Bench], start: int
) -> None:
    nbytes = STRIPE_BYTES + 3 * WINDOW_BYTES
    bench = make(nbytes, "sampled", start=start * nbytes)
    value, found = bench.value(), []
    for number in range(NUM_WINDOWS):
        bench.write_part(value, 0)
        bench.flip(2 * WINDOW_BYTES + 17)
        try:
            bench.read()
        except StorageError:
            found.append(number)
    # Neighbouring chunks begin with different windows; the first write has the next.
    assert found == [(2 - start - 1) % NUM_WINDOWS]


def test_a_write_that_fails_in_place_leaves_what_cannot_be_read(
    filled: Bench, layer: BlockLayer
) -> None:
    with layer.broken(Rule("pwritev", fail(errno.EIO))):
        with pytest.raises(StorageError, match="Input/output error, at byte 0"):
            filled.write(1)
    with pytest.raises(StorageError, match="Cannot link: the last write of this"):
        filled.chunk.link_to(filled.path.with_name("saved"))
    expect_damaged(filled, "the last write of this file failed")


@pytest.mark.parametrize("call", ["pwritev", "allocate", "replace"])
def test_a_write_that_fails_elsewhere_leaves_the_old_content_and_no_file(
    filled: Bench, layer: BlockLayer, call: str
) -> None:
    os.link(filled.path, filled.path.with_name("saved"))
    with layer.broken(Rule(call, fail(errno.EIO))):
        with pytest.raises(StorageError, match="Input/output error"):
            filled.write(1)
    filled.expect(0)
    assert sorted(os.listdir(filled.path.parent)) == ["c.0", "saved"]


def test_a_forgotten_chunk_was_never_written(filled: Bench, layer: BlockLayer) -> None:
    filled.flip(10)
    filled.chunk.forget()
    filled.read()
    with layer.broken(Rule("pwritev", fail(errno.EIO))):
        with pytest.raises(StorageError):
            filled.write()
    filled.chunk.forget()
    filled.write_part(filled.value()[:5], 0)
    assert filled.read(0, 5) == filled.value()[:5].tobytes()


@pytest.mark.parametrize(
    ("padding", "coverage", "is_full"),
    [(0, "full", True), (PADDING, "full", False), (0, "sampled", False)],
)
def test_a_link_is_a_chunk_with_the_content_and_the_checksum_of_its_moment(
    make: Callable[..., Bench],
    layer: BlockLayer,
    padding: int,
    coverage: Coverage,
    is_full: bool,
) -> None:
    bench = make(3 * 2**20, coverage, padding=padding)
    bench.write()
    linked = bench.chunk.link_to(bench.path.with_name("saved"))
    bench.write(1)
    linked.move_to(bench.path.with_name("moved"))
    link = Bench(linked, bench.mover)
    link.expect(0)
    parts: list[bytes] = []
    with layer.broken(Rule("sync", pretend)):
        linked.check(lambda p: parts.append(p.tobytes()), link.mover, durable=True)
    assert b"".join(parts) == link.path.read_bytes()
    # Of every byte of the file.
    assert (linked.full_checksum is not None) == is_full
    # Of the window of the first write.
    link.flip(WINDOW_BYTES)
    with pytest.raises(StorageError, match="not what was written"):
        linked.check(lambda part: None, link.mover, durable=False)


def test_a_read_that_must_not_wait_does_not_wait_for_a_write(
    filled: Bench, layer: BlockLayer
) -> None:
    gate, system = Gate(), layer.system
    now = Mover(system, filled.mover.block_bytes, is_direct=False, only_cached=True)
    with ThreadPoolExecutor(1) as thread, layer.broken(Rule("pwritev", gate)):
        writing = thread.submit(filled.other().write, 1)
        gate.wait()
        with pytest.raises(BlockingIOError):
            Bench(filled.chunk, now).read()
        gate.open()
        writing.result(SECONDS_TO_WAIT)
    filled.expect(1)


@pytest.mark.parametrize("nbytes", [100, DIRECT_FROM_BYTES + 4096])
def test_threads_find_one_content_or_the_other_never_a_mixture(
    make: Callable[..., Bench], tmp_nvme: Path, nbytes: int
) -> None:
    bench = make(nbytes)
    bench.write()
    allowed = {bench.value(seed).tobytes() for seed in range(3)}

    def work(thread: int) -> None:
        own = bench.other()
        for _ in range(15):
            if thread % 2:
                own.write(thread // 2)
            else:
                assert own.read() in allowed

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert os.listdir(tmp_nvme) == ["c.0"]
    assert open_files(tmp_nvme) == []
