"""Whatever is written in whatever order, what is read is what was written."""

import errno
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import DRIVE
from zinf.memory import NvmeStore, StorageError, aligned_empty
from zinf.memory.chunk import chunk_shape
from zinf.memory.nvme import Drive, File, Profile, System, save_profile
from zinf.memory.zarr_format import numpy_dtype
from zinf.program import ArrayId, ArraySpec, Role

PAGE_BYTES = 4096
# Everything is small, so that a few pages show what gigabytes would.
SMALL = {
    "aligned.PAGED_FROM_BYTES": PAGE_BYTES,
    "nvme.open_file.DIRECT_FROM_BYTES": 2 * PAGE_BYTES,
    "nvme.open_file.STAGING_BYTES": 2 * PAGE_BYTES,
    "nvme.store.DIRECT_FROM_BYTES": 2 * PAGE_BYTES,
    "nvme.file.SPAN_BYTES": 3 * PAGE_BYTES,
    "nvme.checksum.WINDOW_BYTES": 512,
    "nvme.checksum.STRIPE_BYTES": 8 * 512,
    "nvme.array.chunk_shape": partial(chunk_shape, max_bytes=4 * PAGE_BYTES),
}
SECONDS_TO_WAIT = 60
FILE_BYTES = 20 * PAGE_BYTES

repeatable = partial(settings, derandomize=True, deadline=None, database=None)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            module, _, attribute = name.rpartition(".")
            patch.setattr(import_module(f"zinf.memory.{module}"), attribute, value)
        yield


def open_buffered(path: Path, flags: int, *mode: int) -> int:
    """As a file system does that has no O_DIRECT."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no O_DIRECT here")
    return os.open(path, flags, *mode)


SYSTEMS = {"direct": System(), "buffered": System(open=open_buffered)}


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=DRIVE) as name:
        yield Path(name)


# Arrays.


@dataclass(frozen=True)
class Step:
    """Something to do with one array; `low` and `high` say which of its rows."""

    verb: str
    array: int
    seed: int
    low: float
    high: float

    def rows(self, num_rows: int) -> tuple[int, int]:
        start = min(int(self.low * num_rows), num_rows - 1)
        stop = min(int(self.high * num_rows) + 1, num_rows)
        return min(start, stop - 1), max(start + 1, stop)


@dataclass(frozen=True)
class Case:
    """How a store is made, and what each of some threads does with it."""

    specs: list[ArraySpec]
    rows_per_chunk: int | None
    programs: list[list[Step]]
    system: str
    checksums: str
    num_folders: int
    profile: Profile


@st.composite
def specs(draw: st.DrawFn) -> ArraySpec:
    dtype = numpy_dtype(draw(st.sampled_from(["bfloat16", "float32", "int8", "bool"])))
    shape = draw(
        st.one_of(
            st.just(()),
            st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
            # Up to several chunks, with rows of any length and long ones.
            st.tuples(st.integers(1, 20), st.integers(1, 3000)),
            st.tuples(st.integers(1, 30_000)),
            st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4000)),
        )
    )
    return ArraySpec(shape, dtype.name, dtype.itemsize)


VERBS = ["write", "write rows", "read", "read rows", "free", "link"]
steps = st.builds(
    Step,
    verb=st.sampled_from(VERBS),
    array=st.integers(0, 3),
    seed=st.integers(0, 2**16),
    low=st.floats(0, 1),
    high=st.floats(0, 1),
)
profiles = st.builds(
    Profile,
    block_bytes=st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES, 64 * PAGE_BYTES]),
    num_threads=st.integers(1, 4),
    # So that opening a store does not measure the drives.
    mixed_bytes_per_second=st.sampled_from([1e9, 3e9]),
)
cases = st.builds(
    Case,
    specs=st.lists(specs(), min_size=1, max_size=3),
    rows_per_chunk=st.one_of(st.none(), st.integers(1, 7)),
    programs=st.lists(st.lists(steps, min_size=1, max_size=14), min_size=1, max_size=3),
    system=st.sampled_from(list(SYSTEMS)),
    checksums=st.sampled_from(["full", "sampled", "off"]),
    num_folders=st.integers(1, 2),
    profile=profiles,
)


def content(spec: ArraySpec, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits at all, of which every one counts."""
    numel = int(np.prod(shape))
    random = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return random.integers(0, 2, shape, np.uint8).astype(bool)
    bits = random.integers(0, 256, numel * spec.itemsize, np.uint8)
    return bits.view(numpy_dtype(spec.dtype)).reshape(shape)


@dataclass
class Known:
    """What an array is expected to hold."""

    spec: ArraySpec
    value: np.ndarray
    is_written: np.ndarray


class Worker:
    """One thread's arrays: asks for one thing after the other, and waits late."""

    def __init__(self, case: Case, store: NvmeStore, number: int, links: Path) -> None:
        self._case, self._store, self._number, self._links = case, store, number, links
        self._known: dict[ArrayId, Known] = {}
        self._pending: dict[ArrayId, tuple[Future[Any], np.ndarray | None]] = {}
        self._linked: list[tuple[Path, bytes]] = []

    def run(self, program: list[Step]) -> None:
        for step in program:
            self._do(step)
        for array in list(self._known):
            self._finish(array)
            self._read(array, None)
            self._finish(array)
        for link, expected in self._linked:
            assert link.read_bytes() == expected

    @property
    def held_bytes(self) -> int:
        return sum(known.spec.nbytes for known in self._known.values())

    def _do(self, step: Step) -> None:
        array = ArrayId(Role.PARAM, f"{self._number}/{step.array}")
        # Who uses one array again waits for it; others go on meanwhile.
        self._finish(array)
        known = self._known.get(array) or self._create(array, step)
        num_rows = known.spec.shape[0] if known.spec.shape else 0
        rows = step.rows(num_rows) if num_rows else None
        match step.verb:
            case "write":
                self._write(array, None, step.seed)
            case "write rows":
                self._write(array, rows, step.seed)
            case "read":
                self._read(array, None)
            case "read rows":
                self._read(array, rows)
            case "free":
                self._store.free(array)
                del self._known[array]
            case "link":
                self._link(array)

    def _create(self, array: ArrayId, step: Step) -> Known:
        case = self._case
        spec = case.specs[step.array % len(case.specs)]
        num_rows = spec.shape[0] if spec.shape else 1
        rows_per_chunk = case.rows_per_chunk
        if rows_per_chunk is not None:
            # A file a row is fine, but not of thousands.
            rows_per_chunk = max(rows_per_chunk, num_rows // 9)
        self._store.create(array, spec, rows_per_chunk)
        nothing = np.zeros(spec.shape, numpy_dtype(spec.dtype))
        self._known[array] = Known(spec, nothing, np.zeros(num_rows, bool))
        return self._known[array]

    def _write(self, array: ArrayId, rows: tuple[int, int] | None, seed: int) -> None:
        known = self._known[array]
        where = slice(None) if rows is None else slice(*rows)
        part = known.value[where] if known.spec.shape else known.value
        value = content(known.spec, part.shape, seed)
        wanted = replace(array, rows=rows)
        self._pending[array] = self._store.write(wanted, value.copy()), None
        known.value[where if known.spec.shape else ...] = value
        known.is_written[where] = True

    def _read(self, array: ArrayId, rows: tuple[int, int] | None) -> None:
        known = self._known[array]
        where = slice(None) if rows is None else slice(*rows)
        wanted = replace(array, rows=rows)
        if not known.is_written[where].all():
            with pytest.raises(StorageError, match="never"):
                self._store.read(wanted).result(SECONDS_TO_WAIT)
            return
        expected = known.value[where] if known.spec.shape else known.value
        self._pending[array] = self._store.read(wanted), expected.copy()

    def _link(self, array: ArrayId) -> None:
        """As a checkpoint does, which outlives the array."""
        for path in self._store.chunk_files(array):
            link = self._links / f"{self._number}-{len(self._linked)}"
            os.link(path, link)
            self._linked.append((link, link.read_bytes()))

    def _finish(self, array: ArrayId) -> None:
        future, expected = self._pending.pop(array, (None, None))
        if future is None:
            return
        found = future.result(SECONDS_TO_WAIT)
        if expected is not None:
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.tobytes() == expected.tobytes()


@pytest.mark.slow
@repeatable(max_examples=60)
@given(cases)
def test_what_is_read_is_what_was_written(case: Case) -> None:
    with folder() as root, ExitStack() as opened:
        paths = [root / f"drive {number}" for number in range(case.num_folders)]
        for path in paths:
            path.mkdir()
            save_profile(case.profile, path)
        (root / "links").mkdir()
        store = NvmeStore(paths, checksums=case.checksums, system=SYSTEMS[case.system])
        opened.callback(store.close)
        workers = [
            Worker(case, store, number, root / "links")
            for number in range(len(case.programs))
        ]
        with ThreadPoolExecutor(len(workers)) as threads:
            running = [
                threads.submit(worker.run, program)
                for worker, program in zip(workers, case.programs, strict=True)
            ]
            for done in running:
                done.result(SECONDS_TO_WAIT)
        assert store.ledger.used_bytes == sum(w.held_bytes for w in workers)


# Byte ranges.


@dataclass(frozen=True)
class Move:
    """One read or write of a range, with memory so far beyond a page."""

    is_write: bool
    offset: int
    nbytes: int
    beyond_page: int
    seed: int

    def overlaps(self, other: "Move") -> bool:
        is_apart = (
            self.offset + self.nbytes <= other.offset
            or other.offset + other.nbytes <= self.offset
        )
        return (self.is_write or other.is_write) and not is_apart

    def memory(self) -> np.ndarray:
        pages = aligned_empty((self.nbytes + 2 * PAGE_BYTES,), np.uint8)
        return pages[self.beyond_page : self.beyond_page + self.nbytes]


@st.composite
def moves(draw: st.DrawFn) -> Move:
    near_pages = st.builds(
        lambda page, by: max(0, page * PAGE_BYTES + by),
        st.integers(0, FILE_BYTES // PAGE_BYTES),
        st.integers(-2, 2),
    )
    edges = st.one_of(st.integers(0, FILE_BYTES), near_pages).map(
        lambda edge: min(edge, FILE_BYTES)
    )
    low, high = sorted([draw(edges), draw(edges)])
    return Move(
        is_write=draw(st.booleans()),
        offset=low,
        nbytes=high - low,
        # Some lie like the file does, and need no copy.
        beyond_page=draw(st.sampled_from([0, 1, 64, low % PAGE_BYTES])),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.slow
@repeatable(max_examples=200)
@given(
    st.lists(moves(), min_size=1, max_size=25),
    profiles,
    st.sampled_from(list(SYSTEMS)),
)
def test_a_file_is_the_bytes_that_were_written_to_it(
    asked: list[Move], profile: Profile, system: str
) -> None:
    """Ranges that do not overlap may be under way at once, even in one page."""
    expected = bytearray(FILE_BYTES)
    pending: list[tuple[Move, np.ndarray, bytes]] = []

    def settle(file: File) -> None:
        file.flush()
        for move, memory, content in pending:
            assert memory.tobytes() == content, move
        pending.clear()

    with folder() as root:
        with Drive(root, profile=profile, system=SYSTEMS[system]) as drive:
            file = File(drive, root / "file", nbytes=FILE_BYTES)
            for move in asked:
                if any(move.overlaps(other) for other, _, _ in pending):
                    settle(file)
                memory = move.memory()
                where = slice(move.offset, move.offset + move.nbytes)
                if move.is_write:
                    random = np.random.default_rng(move.seed)
                    memory[:] = random.integers(0, 256, move.nbytes, np.uint8)
                    file.write_async(memory, move.offset)
                    expected[where] = memory.tobytes()
                else:
                    file.read_async(memory, move.offset)
                pending.append((move, memory, bytes(expected[where])))
            settle(file)
        assert (root / "file").read_bytes() == expected
