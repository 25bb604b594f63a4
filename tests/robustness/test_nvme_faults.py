"""Every call of the NVMe tier may fail: the error is named, and nothing is left."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from errno import ENOSPC, ETIMEDOUT
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clock import still
from tests.robustness.faults import (
    SECONDS_TO_WAIT,
    BlockLayer,
    Gate,
    Rule,
    eventually,
    fail,
    fail_after,
    move_at_most,
    open_files,
    threads_of,
)
from zinf.core.memory import NvmeStore
from zinf.core.memory.nvme import Profile, drive, open_file, save_profile
from zinf.core.memory.storage_error import StorageError
from zinf.core.program import ArrayId, ArraySpec, Role

ARRAY = ArrayId(Role.PARAM, "blocks/kernel")
OTHER = ArrayId(Role.PARAM, "other")
# Two chunk files, of each of which 64 pages move past the page cache and the rest
# through the page cache.
SHAPE, ROWS_PER_CHUNK = (40, 3301), 20
SPEC = ArraySpec(SHAPE, "float32", 4)
CHUNK_BYTES = SPEC.nbytes // 2
OLD, NEW = np.random.default_rng(0).standard_normal((2, *SHAPE), np.float32)


@dataclass
class Bench:
    """A store on a faulty drive, and one array of which OLD or NEW is written."""

    layer: BlockLayer
    store: NvmeStore
    folder: Path

    def remove(self) -> None:
        if self.store.contains(ARRAY):
            self.store.free(ARRAY)
            self.store.clear()

    def create(self) -> None:
        self.remove()
        self.store.create(ARRAY, SPEC, rows_per_chunk=ROWS_PER_CHUNK)

    def fill(self) -> None:
        self.create()
        self.write(OLD)

    def link(self) -> None:
        """As a checkpoint does: the next write replaces the files."""
        self.fill()
        for chunk, link in zip(self.store.chunk_files(ARRAY), self.links, strict=True):
            link.unlink(missing_ok=True)
            os.link(chunk, link)

    def write(self, value: np.ndarray, rows: tuple[int, int] | None = None) -> None:
        array = replace(ARRAY, rows=rows)
        self.store.write(array, value.copy()).result(SECONDS_TO_WAIT)

    def read(self) -> np.ndarray:
        return self.store.read(ARRAY).result(SECONDS_TO_WAIT)

    @property
    def links(self) -> list[Path]:
        return [self.folder / f"link {i}" for i in range(2)]

    def expect(self, value: np.ndarray) -> None:
        np.testing.assert_array_equal(self.read(), value)

    def expect_at_rest(self, *, is_there: bool = True) -> None:
        """Nothing is under way or open, and the ledger counts what is there."""
        self.store._flush()
        eventually(lambda: not open_files(self.folder / "arrays"))
        assert self.store.contains(ARRAY) == is_there
        assert self.store.ledger.used_bytes == (SPEC.nbytes if is_there else 0)
        # What was linked is as it was.
        found = b"".join(link.read_bytes() for link in self.links if link.exists())
        assert found in (b"", OLD.tobytes())


# How to make a bench ready, what is asked of it then, and how errors begin.
Verb = tuple[Callable[[Bench], None], Callable[[Bench], object], str]
WRITE = "Cannot write param/blocks/kernel"
VERBS: dict[str, Verb] = {
    "create": (Bench.remove, Bench.create, "Cannot create param/blocks/kernel"),
    "first write": (Bench.create, lambda b: b.write(OLD), WRITE),
    "overwrite": (Bench.fill, lambda b: b.write(NEW), WRITE),
    "replace": (Bench.link, lambda b: b.write(NEW), WRITE),
    "write row": (Bench.fill, lambda b: b.write(NEW[21:22], (21, 22)), WRITE),
    "read": (Bench.fill, Bench.read, "Cannot read param/blocks/kernel"),
}


def refusal(bench: Bench, verb: Verb, *rules: Rule) -> StorageError:
    """What `verb` raises while `rules` hold."""
    prepare, run, _ = verb
    prepare(bench)
    with bench.layer.broken(*rules), pytest.raises(StorageError) as caught:
        run(bench)
    return caught.value


# What can be refused to each verb: calls, and the errors that each may name.
REFUSED = {
    "create": "open EIO EACCES EROFS EMFILE, allocate EIO ENOSPC EDQUOT EFBIG, "
    "close EIO",
    "first write": "open EROFS, pwritev ENOSPC EFBIG, close EIO",
    "overwrite": "open EACCES, stat EIO, pwritev EIO EAGAIN EDQUOT, close EIO",
    "replace": "open EMFILE, allocate EIO ENOSPC, pwritev EDQUOT, "
    "replace EIO ENOSPC EACCES, close EIO",
    "write row": "open EIO, stat EIO, preadv EIO, pwritev EIO",
    "read": "open EIO, stat EIO, preadv EIO EAGAIN, close EIO",
}


def refused() -> Iterator[tuple[str, str, int]]:
    for verb, calls in REFUSED.items():
        for each in calls.split(", "):
            call, *codes = each.split()
            for code in codes:
                yield verb, call, getattr(errno, code)


@contextmanager
def benches(*folders: Path) -> Iterator[Callable[..., Bench]]:
    """Makes benches in `folders`; nothing may be left of them in the end."""
    made: list[NvmeStore] = []
    for folder in folders:
        folder.mkdir(exist_ok=True)
        # Drives are taken for equally fast, without measuring them.
        save_profile(Profile(mixed_bytes_per_second=1e9, num_threads=2), folder)

    def make(**settings: Any) -> Bench:
        layer = BlockLayer()
        settings = {"checksums": "full", "system": layer.system} | settings
        made.append(NvmeStore(folders, **settings))
        return Bench(layer, made[-1], folders[0])

    try:
        yield make
    finally:
        for store in made:
            store.close()
    for folder in folders:
        eventually(lambda folder=folder: not threads_of(folder))
        assert open_files(folder) == []


@pytest.fixture
def make(tmp_nvme: Path) -> Iterator[Callable[..., Bench]]:
    with benches(tmp_nvme) as make:
        yield make


def test_what_a_call_refuses_is_named_and_leaves_nothing(make, golden, tmp_nvme):
    bench, lines, advice = make(), [], {}
    for name, call, code in refused():
        deed = fail_after(code) if call == "close" else fail(code)
        # Of the second chunk only: the first may be written, or skipped.
        error = refusal(bench, VERBS[name], Rule(call, deed, path="*/c.1.0*"))
        assert error.errno == code
        file = Path(error.filename)
        assert file.parents[1] == tmp_nvme / "arrays"
        assert error.strerror.startswith(VERBS[name][2])
        found, _, advised = error.strerror.partition(". ")
        lines.append(f"{name}, {call}, {file.name}: {found}")
        assert advice.setdefault(errno.errorcode[code], advised) == advised
        bench.expect_at_rest(is_there=name != "create")
        if name == "read":
            bench.expect(OLD)
        elif name != "create":
            with pytest.raises(StorageError, match="its last write failed"):
                bench.read()
    for name, (prepare, ask, _) in VERBS.items():
        prepare(bench)
        ask(bench)
        if name in ("overwrite", "replace"):
            bench.expect(NEW)
    lines += ["", *(f"{name}: {advised}" for name, advised in sorted(advice.items()))]
    golden.check("errors_of_calls.txt", "\n".join(lines))


@pytest.mark.parametrize("verb", ["first write", "overwrite", "replace"])
def test_a_drive_that_is_full_in_mid_write_is_named(make, verb):
    """Half of a chunk is written, then there is no more room."""
    bench, half = make(), 32 * 4096
    rules = (
        Rule("pwritev", fail(ENOSPC), when=lambda c: c.offset >= half),
        Rule("pwritev", move_at_most(half)),
    )
    error = refusal(bench, VERBS[verb], *rules)
    assert error.errno == ENOSPC
    assert f"at byte {half:,}, of {half:,} bytes asked" in str(error)
    with pytest.raises(StorageError, match="its last write failed"):
        bench.read()
    bench.expect_at_rest()


def test_one_of_two_drives_that_stalls_is_named_and_may_recover(tmp_path):
    with (
        still("monotonic", drive, open_file) as clock,
        benches(tmp_path / "a", tmp_path / "b") as make,
    ):
        bench, gate = make(stall_seconds=0.2), Gate()
        bench.fill()
        small = np.zeros((4, 4), np.float32)
        bench.store.create(OTHER, ArraySpec((4, 4), "float32", 4), rows_per_chunk=1)
        bench.store.write(OTHER, small.copy()).result()
        stall = Rule("pwritev", gate, path="*/b/arrays/*")
        with bench.layer.broken(stall, is_cached=True):
            writing = bench.store.write(ARRAY, NEW)
            gate.wait()
            clock.advance(0.3)
            error = writing.exception(SECONDS_TO_WAIT)
            assert isinstance(error, StorageError) and error.errno == ETIMEDOUT
            assert error.filename == str(tmp_path / "b")
            assert "Check the drive and its cable" in str(error)
            # Though the page cache has its bytes.
            refused = bench.store.read(OTHER).exception(SECONDS_TO_WAIT)
            assert isinstance(refused, StorageError) and refused.errno == ETIMEDOUT
            gate.open()
        eventually(lambda: not any(d.is_stalled for d in bench.store._drives))
        bench.write(NEW)
        bench.expect(NEW)
        np.testing.assert_array_equal(bench.store.read(OTHER).result(), small)
