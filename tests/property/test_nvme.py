"""Whatever is asked in whatever order and fails, what is read is what was written."""

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import DRIVE
from tests.robustness.faults import (
    SECONDS_TO_WAIT,
    BlockLayer,
    Deed,
    Rule,
    fail,
    move_at_most,
    open_buffered,
    open_files,
)
from zinf.core.memory import NvmeStore, StorageError
from zinf.core.memory.chunk import chunk_shape
from zinf.core.memory.nvme import Profile, System, save_profile
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArrayId, ArraySpec, Role

PAGE_BYTES = 4096
# Everything is small: a few pages show what gigabytes would.
SMALL = {
    "host.aligned.PAGED_FROM_BYTES": PAGE_BYTES,
    "nvme.open_file.DIRECT_FROM_BYTES": 2 * PAGE_BYTES,
    "nvme.open_file.STAGING_BYTES": 2 * PAGE_BYTES,
    "nvme.store.DIRECT_FROM_BYTES": 2 * PAGE_BYTES,
    "nvme.file.SPAN_BYTES": 3 * PAGE_BYTES,
    "nvme.checksum.WINDOW_BYTES": 512,
    "nvme.checksum.STRIPE_BYTES": 8 * 512,
    "nvme.array.chunk_shape": partial(chunk_shape, max_bytes=4 * PAGE_BYTES),
}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            module, _, attribute = name.rpartition(".")
            patch.setattr(import_module(f"zinf.core.memory.{module}"), attribute, value)
        yield


profiles = st.builds(
    Profile,
    block_bytes=st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES, 64 * PAGE_BYTES]),
    num_threads=st.integers(1, 4),
    # So that opening a store does not measure the drives.
    mixed_bytes_per_second=st.sampled_from([1e9, 3e9]),
)
arrays = st.integers(0, 2).map(lambda number: ArrayId(Role.PARAM, f"{number}"))
seeds = st.integers(0, 2**16)
# Where a range of rows begins and ends, of all rows; None is the whole array.
ranges = st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)
dtypes = st.sampled_from(["bfloat16", "float32", "int8", "bool"])
shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
    # Up to several chunks, with rows of any length and long ones.
    st.tuples(st.integers(1, 20), st.integers(1, 3000)),
    st.tuples(st.integers(1, 30_000)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4000)),
)
# Shape, dtype, and rows of a chunk.
specs = st.lists(
    st.tuples(shapes, dtypes, st.none() | st.integers(1, 7)), min_size=1, max_size=3
)
INTERRUPTED, SHORT = fail(errno.EINTR), move_at_most(5001)
HARMLESS: list[Deed] = [INTERRUPTED, SHORT]
HARMFUL: list[Deed] = [fail(errno.EIO), fail(errno.ENOSPC), fail(errno.EAGAIN)]


def content(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits at all, of which every one counts."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, shape, np.uint8).astype(bool)
    kind = numpy_dtype(dtype)
    bits = random.integers(0, 256, prod(shape) * kind.itemsize, np.uint8)
    return bits.view(kind).reshape(shape)


@dataclass(frozen=True)
class Asked:
    """A read or write that was not waited for; `value` is what moves."""

    future: Future[Any]
    is_write: bool
    rows: tuple[int, int] | None
    value: np.ndarray


@dataclass
class Known:
    """What an array holds.

    Attributes:
        is_written: of each row, whether there is content to read.
        is_doubtful: whether a write failed, which may have damaged other rows too.
    """

    value: np.ndarray
    is_written: np.ndarray
    is_doubtful: bool = False
    asked: Asked | None = None

    def rows(self, part: list[float] | None) -> tuple[int, int] | None:
        num_rows = self.value.shape[0] if self.value.shape else 0
        if part is None or not num_rows:
            return None
        start = min(int(part[0] * num_rows), num_rows - 1)
        return start, max(start + 1, min(int(part[1] * num_rows) + 1, num_rows))


class Storage(RuleBasedStateMachine):
    """A store beside a dict of arrays: both are asked the same."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = ExitStack()
        folder = tempfile.TemporaryDirectory(dir=DRIVE)
        self.root = Path(self.opened.enter_context(folder))
        self.known: dict[ArrayId, Known] = {}
        self.links: list[tuple[Path, bytes]] = []
        self.read_bytes = self.written_bytes = 0

    @initialize(
        profile=profiles,
        real=st.sampled_from([System(), System(open=open_buffered)]),
        checksums=st.sampled_from(["full", "sampled", "off"]),
        num_folders=st.integers(1, 2),
        specs=specs,
    )
    def open_store(self, profile, real, checksums, num_folders, specs):
        self.specs = specs
        self.layer = BlockLayer(real)
        self.paths = [self.root / f"drive {number}" for number in range(num_folders)]
        for path in self.paths:
            path.mkdir()
            save_profile(profile, path)
        system = self.layer.system
        self.make = partial(NvmeStore, self.paths, checksums=checksums, system=system)
        self.store = self.make()

    @rule(array=arrays, code=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def create_on_a_full_drive(self, array, code):
        for each in self.known:
            self._finish(each)
        self.free(array)
        with self.layer.broken(Rule("allocate", fail(code), first=2), is_sure=False):
            try:
                self._use(array)
            except StorageError as error:
                assert error.errno == code and not self.store.contains(array)

    @rule(array=arrays, part=ranges, seed=seeds)
    def write(self, array, part, seed):
        known = self._use(array)
        rows = known.rows(part)
        where = ... if rows is None else slice(*rows)
        value = content(known.value.dtype.name, known.value[where].shape, seed)
        future = self.store.write(replace(array, rows=rows), value.copy())
        known.asked = Asked(future, True, rows, value)

    @rule(array=arrays, part=ranges)
    def read(self, array, part):
        known = self._use(array)
        rows = known.rows(part)
        where = ... if rows is None else slice(*rows)
        if not known.is_written[where].all():
            with pytest.raises(StorageError, match="it was never"):
                self.store.read(replace(array, rows=rows))
            return
        future = self.store.read(replace(array, rows=rows))
        known.asked = Asked(future, False, rows, known.value[where].copy())

    @rule(
        array=arrays,
        part=ranges,
        seed=seeds,
        is_write=st.booleans(),
        calls=st.sampled_from(["preadv pwritev", "open", "stat", "allocate replace"]),
        deed=st.sampled_from(HARMLESS + HARMFUL),
        first=st.integers(1, 4),
    )
    def fault(self, array, part, seed, is_write, calls, deed, first):
        """One array meets a fault while the others may be under way."""
        self._use(array)
        calls = "preadv pwritev" if deed is SHORT else calls
        times = 2 if deed is INTERRUPTED else inf
        files = f"*/arrays/{self.store.folder(array).name}/*"
        fault = Rule(calls, deed, path=files, first=first, times=times)
        with self.layer.broken(fault, is_sure=False):
            if is_write:
                self.write(array, part, seed)
            else:
                self.read(array, part)
            self._finish(array, may_fail=deed in HARMFUL)

    @rule(array=arrays)
    def free(self, array):
        self._finish(array)
        if self.known.pop(array, None):
            self.store.free(array)

    @rule(array=arrays)
    def link(self, array):
        """As a checkpoint does, which outlives the array."""
        self._use(array)
        for path in self.store.chunk_files(array):
            link = self.root / f"link {len(self.links)}"
            os.link(path, link)
            self.links.append((link, link.read_bytes()))

    @precondition(lambda self: len(self.known) == 3)
    @rule()
    def reopen(self) -> None:
        """Arrays are gone; links are not."""
        self._close()
        self.known.clear()
        self.read_bytes = self.written_bytes = 0
        self.store = self.make()
        assert not any(os.listdir(path / "arrays") for path in self.paths)

    @invariant()
    def what_is_held_is_counted(self) -> None:
        if not hasattr(self, "store"):
            return
        held_bytes = sum(known.value.nbytes for known in self.known.values())
        assert self.store.ledger.used_bytes == held_bytes
        live, nbytes = {}, {}
        for line in (self.paths[0] / "zinf.index.jsonl").read_text().splitlines():
            entry = json.loads(line)
            name = entry["name"]
            if "freed" in entry:
                del live[name]
            else:
                live[name] = entry["array"]
                itemsize = numpy_dtype(entry["dtype"]).itemsize
                nbytes[name] = prod(entry["shape"]) * itemsize
        assert sorted(live.values()) == sorted(map(str, self.known))
        # Files without an array hold no more than arrays held already.
        folders = os.listdir(self.paths[0] / "arrays")
        assert sum(nbytes[name] for name in folders) <= self.store.ledger.peak_bytes

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for array in self.known:
                self.read(array, None)
            self._close()
        self.opened.close()

    def _close(self) -> None:
        for array in self.known:
            self._finish(array)
        assert self.store.read_bytes == self.read_bytes
        assert self.store.written_bytes == self.written_bytes
        self.store.close()
        assert not any(map(open_files, self.paths))
        for link, expected in self.links:
            assert link.read_bytes() == expected

    def _use(self, array: ArrayId) -> Known:
        """The array, with nothing under way; made if there is none."""
        self._finish(array)
        if array not in self.known:
            shape, dtype, rows_per_chunk = self.specs[int(array.path) % len(self.specs)]
            num_rows = shape[0] if shape else 1
            if rows_per_chunk is not None:
                # A file a row is fine, but not thousands of files.
                rows_per_chunk = max(rows_per_chunk, num_rows // 9)
            value = np.zeros(shape, numpy_dtype(dtype))
            spec = ArraySpec(shape, dtype, value.itemsize)
            self.store.create(array, spec, rows_per_chunk)
            self.known[array] = Known(value, np.zeros(num_rows, bool))
        return self.known[array]

    def _finish(self, array: ArrayId, *, may_fail: bool = False) -> None:
        known = self.known.get(array)
        if known is None or known.asked is None:
            return
        asked, known.asked = known.asked, None
        where = ... if asked.rows is None else slice(*asked.rows)
        try:
            found = asked.future.result(SECONDS_TO_WAIT)
        except StorageError:
            assert may_fail or known.is_doubtful
            if asked.is_write:
                known.is_written[where] = False
                known.is_doubtful = True
            return
        if asked.is_write:
            known.value[where] = asked.value
            known.is_written[where] = True
            known.is_doubtful &= asked.rows is not None
            self.written_bytes += asked.value.nbytes
        else:
            assert (found.dtype, found.shape) == (asked.value.dtype, asked.value.shape)
            assert found.tobytes() == asked.value.tobytes()
            self.read_bytes += found.nbytes


def test_what_is_read_is_what_was_written() -> None:
    repeatable = settings(
        max_examples=60,
        stateful_step_count=25,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Storage, settings=repeatable)
