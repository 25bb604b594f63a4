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
    Gate,
    Rule,
    fail,
    flip_bit,
    misplace,
    pretend,
    read_zeros,
)
from zinf.core.memory import StorageError, aligned_empty
from zinf.core.memory.nvme.checksum import (
    NUM_WINDOWS,
    STRIPE_BYTES,
    WINDOW_BYTES,
    Coverage,
)
from zinf.core.memory.nvme.chunk_file import ChunkFile
from zinf.core.memory.nvme.open_file import DIRECT_FROM_BYTES, Mover

# Through the page cache, and past it.
SIZES = [100, DIRECT_FROM_BYTES + 1001]
PADDING = 96


@dataclass
class Bench:
    """A chunk file and the mover that reads and writes it."""

    chunk: ChunkFile
    mover: Mover

    @property
    def path(self) -> Path:
        return self.chunk.path

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

    def flip(self, byte: int) -> None:
        with self.path.open("r+b") as file:
            old = os.pread(file.fileno(), 1, byte)[0]
            os.pwrite(file.fileno(), bytes([old ^ 4]), byte)

    def resize(self, by: int) -> None:
        os.truncate(self.path, self.chunk.file_bytes + by)

    def link(self) -> Path:
        saved = self.path.with_name("saved")
        os.link(self.path, saved)
        return saved

    def other(self) -> "Bench":
        """The same file, moved by another thread."""
        mover = self.mover
        return Bench(
            self.chunk,
            Mover(mover.system, mover.block_bytes, is_direct=mover.is_direct),
        )


@pytest.fixture
def make(tmp_nvme: Path, mover: Mover) -> Callable[..., Bench]:
    def make(
        nbytes: int = 100, coverage: Coverage = "full", start: int = 0, **sizes: int
    ) -> Bench:
        chunk = ChunkFile(
            tmp_nvme / "c.0",
            start=start,
            nbytes=nbytes,
            file_bytes=nbytes + sizes.get("padding", PADDING),
            coverage=coverage,
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
        assert (error.value.errno, error.value.filename) == (code, str(bench.path))
    bench.write(1)
    bench.expect(1)
    assert bench.path.stat().st_size == bench.chunk.file_bytes


def test_a_file_is_zeros_then_what_was_written_and_padding(make):
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


def test_a_file_is_overwritten_in_place_until_it_is_linked(filled):
    node = filled.path.stat().st_ino
    filled.write(1)
    assert filled.path.stat().st_ino == node
    link = filled.link()
    for seed in (2, 3):
        filled.write(seed)
        filled.expect(seed)
    assert link.read_bytes() == filled.value(1).tobytes() + bytes(PADDING)
    found = filled.path.stat()
    assert found.st_ino != node and found.st_nlink == link.stat().st_nlink == 1
    assert found.st_size == filled.chunk.file_bytes
    assert found.st_mode & 0o777 == 0o600
    assert sorted(os.listdir(filled.path.parent)) == ["c.0", "saved"]


def test_a_read_under_way_sees_the_old_content_to_the_end(filled, layer):
    gate = Gate()
    with ThreadPoolExecutor(1) as thread, layer.broken(Rule("preadv", gate)):
        reading = thread.submit(filled.other().read)
        gate.wait()
        for seed in (1, 2):
            filled.write(seed)
        gate.open()
        assert reading.result(SECONDS_TO_WAIT) == filled.value().tobytes()
    node = filled.path.stat().st_ino
    filled.write(3)
    assert filled.path.stat().st_ino == node
    filled.expect(3)


DAMAGES: dict[str, tuple[Callable[[Bench], object], int, str]] = {
    "missing": (lambda b: b.path.unlink(), errno.ENOENT, "Something deleted files"),
    "short": (lambda b: b.resize(-1), errno.EIO, r"has [\d,]+ bytes instead of"),
    "long": (lambda b: b.resize(1), errno.EIO, r"has [\d,]+ bytes instead of"),
    "first byte": (lambda b: b.flip(0), errno.EIO, "not what was written"),
    "last byte": (
        lambda b: b.flip(b.chunk.nbytes - 1),
        errno.EIO,
        r"checksum \w{16} instead of \w{16}, of [\d,]+ bytes from byte 0",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_was_changed_is_never_read(filled, damage):
    do, code, message = DAMAGES[damage]
    do(filled)
    expect_damaged(filled, message, code)


LIES: dict[str, Rule] = {
    "writes nothing": Rule("pwritev", pretend),
    "writes a wrong bit": Rule("pwritev", flip_bit(7)),
    "writes elsewhere": Rule("pwritev", misplace),
    "renames nothing": Rule("replace", pretend),
}


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_drive_that_reports_success_and_did_not_write_is_found_out(
    filled, layer, lie, is_linked
):
    if is_linked:
        filled.link()
    with layer.broken(LIES[lie], is_sure=is_linked):
        filled.write(1)
    if not layer.num_faults:
        filled.expect(1)
    elif filled.path.stat().st_size == filled.chunk.file_bytes:
        expect_damaged(filled, "not what was written")
    else:
        expect_damaged(filled, "bytes instead of")


@pytest.mark.parametrize("deed", [flip_bit(11), read_zeros, misplace])
def test_a_drive_that_reads_other_bytes_is_found_out(filled, layer, deed):
    with layer.broken(Rule("preadv", deed)):
        with pytest.raises(StorageError, match="not what was written"):
            filled.read()
    filled.expect(0)


def test_without_checksums_only_sizes_are_compared(make):
    bench = make(coverage="off")
    bench.write()
    bench.flip(10)
    expected = bench.value()
    expected[10] ^= 4
    assert bench.read() == expected.tobytes()
    bench.resize(-97)
    expect_damaged(bench, "has 99 bytes instead of 196")


@pytest.mark.parametrize("start", [0, 5])
def test_a_byte_that_stays_wrong_is_found_once_in_16_sampled_writes(make, start):
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


def test_a_write_that_fails_in_place_leaves_what_cannot_be_read(filled, layer):
    with layer.broken(Rule("pwritev", fail(errno.EIO))):
        with pytest.raises(StorageError, match="Input/output error, at byte 0"):
            filled.write(1)
    with pytest.raises(StorageError, match="Cannot link: the last write of this"):
        filled.chunk.link_to(filled.path.with_name("saved"))
    expect_damaged(filled, "the last write of this file failed")


@pytest.mark.parametrize("call", ["pwritev", "allocate", "replace"])
def test_a_write_that_fails_elsewhere_leaves_the_old_content_and_no_file(
    filled, layer, call
):
    filled.link()
    with layer.broken(Rule(call, fail(errno.EIO))):
        with pytest.raises(StorageError, match="Input/output error"):
            filled.write(1)
    filled.expect(0)
    assert sorted(os.listdir(filled.path.parent)) == ["c.0", "saved"]


def test_a_forgotten_chunk_was_never_written(filled, layer):
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
    make, layer, padding, coverage, is_full
):
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


def test_a_read_that_must_not_wait_does_not_wait_for_a_write(filled, layer):
    gate = Gate()
    now = Mover(layer.system, 4096, is_direct=False, only_cached=True)
    with ThreadPoolExecutor(1) as thread, layer.broken(Rule("pwritev", gate)):
        writing = thread.submit(filled.other().write, 1)
        gate.wait()
        with pytest.raises(BlockingIOError):
            Bench(filled.chunk, now).read()
        gate.open()
        writing.result(SECONDS_TO_WAIT)
    filled.expect(1)
