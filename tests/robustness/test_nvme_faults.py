"""Every call of the NVMe tier may fail: the error is named, and nothing is left."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from errno import (
    EACCES,
    EAGAIN,
    EDQUOT,
    EFBIG,
    EIO,
    EMFILE,
    ENOSPC,
    EROFS,
    ETIMEDOUT,
)
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clock import still
from tests.golden import Golden
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
from zinf.memory import NvmeStore
from zinf.memory.nvme import Profile, drive, open_file, save_profile
from zinf.memory.storage_error import StorageError
from zinf.program import ArrayId, ArraySpec, Role

ARRAY = ArrayId(Role.PARAM, "blocks/kernel")
OTHER = ArrayId(Role.PARAM, "other")


@dataclass(frozen=True)
class Size:
    """An array in two chunk files."""

    shape: tuple[int, int]

    @property
    def rows_per_chunk(self) -> int:
        return self.shape[0] // 2

    @property
    def row(self) -> int:
        """A row in the middle of the second chunk."""
        return self.rows_per_chunk + 1

    @property
    def chunk_bytes(self) -> int:
        return self.rows_per_chunk * self.shape[1] * 4


# Chunks of 48 bytes go through the page cache. Of the larger ones 64 pages do not, and
# the rest does.
SIZES = {"small": Size((6, 4)), "large": Size((40, 3301))}


@dataclass
class Bench:
    """A store of one array, of which `old` was written; `new` is about to be."""

    layer: BlockLayer
    store: NvmeStore
    folder: Path
    size: Size
    old: np.ndarray = field(init=False)
    new: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(0).standard_normal
        self.old, self.new = (draw(self.size.shape, np.float32) for _ in "on")
        for link in self.links:
            link.unlink(missing_ok=True)

    def remove(self) -> None:
        if self.store.contains(ARRAY):
            self.store.free(ARRAY)
            self.store.clear()

    def create(self) -> None:
        spec = ArraySpec(self.size.shape, "float32", 4)
        self.store.create(ARRAY, spec, rows_per_chunk=self.size.rows_per_chunk)

    def fill(self) -> None:
        self.remove()
        self.create()
        self.write(self.old)

    def write(self, value: np.ndarray) -> None:
        self.store.write(ARRAY, value.copy()).result(SECONDS_TO_WAIT)

    def read(self) -> np.ndarray:
        return self.store.read(ARRAY).result(SECONDS_TO_WAIT)

    @property
    def chunks(self) -> list[Path]:
        return self.store.chunk_files(ARRAY)

    @property
    def links(self) -> list[Path]:
        """Where a checkpoint would have linked the chunk files."""
        return [self.folder / f"link {i}" for i in range(2)]

    def expect(self, value: np.ndarray) -> None:
        np.testing.assert_array_equal(self.read(), value)

    def expect_one_of(self, *allowed: np.ndarray) -> None:
        """Reading raises, or gives one of the arrays, whole."""
        try:
            found = self.read()
        except StorageError:
            return
        assert any(np.array_equal(found, value) for value in allowed)

    def expect_at_rest(self, *, is_there: bool = True) -> None:
        """Nothing is under way or open, and the ledger counts what is there."""
        self.store._flush()
        eventually(lambda: not open_files(self.folder / "arrays"))
        assert self.store.contains(ARRAY) == is_there
        expected = self.size.chunk_bytes * 2 if is_there else 0
        assert self.store.ledger.used_bytes == expected
        # What was linked is as it was.
        found = b"".join(link.read_bytes() for link in self.links if link.exists())
        assert found in (b"", self.old.tobytes())

    def expect_works(self) -> None:
        """Every verb succeeds, with the right bytes."""
        for verb in VERBS.values():
            verb.prepare(self)
            verb.run(self)
            if verb.run is not Bench.create:
                self.expect(verb.result(self))
        self.expect_at_rest()


@dataclass(frozen=True)
class Verb:
    """Something to ask of a bench.

    Args:
        prepare: makes the bench ready, while all is well, whatever happened before.
        run: what may fail; raises AssertionError if what it gives is wrong.
        result: what is read after it succeeded.
        what: begins the message of what it raises.
    """

    prepare: Callable[[Bench], None]
    run: Callable[[Bench], None]
    result: Callable[[Bench], np.ndarray]
    what: str = "Cannot write param/blocks/kernel"


def _write_row(bench: Bench) -> None:
    rows = (bench.size.row, bench.size.row + 1)
    value = bench.new[slice(*rows)].copy()
    bench.store.write(replace(ARRAY, rows=rows), value).result(SECONDS_TO_WAIT)


def _link(bench: Bench) -> None:
    bench.fill()
    for chunk, link in zip(bench.chunks, bench.links, strict=True):
        link.unlink(missing_ok=True)
        os.link(chunk, link)


def _with_new_row(bench: Bench) -> np.ndarray:
    value = bench.old.copy()
    value[bench.size.row] = bench.new[bench.size.row]
    return value


def _create(bench: Bench) -> None:
    bench.remove()
    bench.create()


VERBS = {
    "create": Verb(
        Bench.remove,
        Bench.create,
        lambda b: b.old,
        "Cannot create param/blocks/kernel",
    ),
    "first write": Verb(_create, lambda b: b.write(b.old), lambda b: b.old),
    "overwrite": Verb(Bench.fill, lambda b: b.write(b.new), lambda b: b.new),
    # A write of files that are linked.
    "replace": Verb(_link, lambda b: b.write(b.new), lambda b: b.new),
    "write row": Verb(Bench.fill, _write_row, _with_new_row),
    "read": Verb(
        Bench.fill,
        lambda b: b.expect(b.old),
        lambda b: b.old,
        "Cannot read param/blocks/kernel",
    ),
}


def run(bench: Bench, verb: Verb, *rules: Rule) -> StorageError | None:
    """What `verb` raises while `rules` hold."""
    verb.prepare(bench)
    with bench.layer.broken(*rules):
        try:
            verb.run(bench)
        except StorageError as error:
            return error
    return None


# What can be refused to each verb: the call, and the errors that it may name.
REFUSED = {
    "create": {
        "open": [EIO, EACCES, EROFS, EMFILE],
        "allocate": [EIO, ENOSPC, EDQUOT, EFBIG],
        "close": [EIO],
    },
    "first write": {"open": [EROFS], "pwritev": [ENOSPC, EFBIG], "close": [EIO]},
    "overwrite": {
        "open": [EACCES],
        "stat": [EIO],
        "pwritev": [EIO, EAGAIN, EDQUOT],
        "close": [EIO],
    },
    "replace": {
        "open": [EMFILE],
        "allocate": [EIO, ENOSPC],
        "pwritev": [EDQUOT],
        "replace": [EIO, ENOSPC, EACCES],
        "close": [EIO],
    },
    "write row": {"open": [EIO], "stat": [EIO], "preadv": [EIO], "pwritev": [EIO]},
    "read": {"open": [EIO], "stat": [EIO], "preadv": [EIO, EAGAIN], "close": [EIO]},
}


@contextmanager
def benches(*folders: Path) -> Iterator[Callable[..., Bench]]:
    """Makes benches in `folders`; nothing may be left of them in the end."""
    made: list[NvmeStore] = []
    for folder in folders:
        folder.mkdir(exist_ok=True)
        # Drives are taken for equally fast, without measuring them.
        save_profile(Profile(mixed_bytes_per_second=1e9, num_threads=2), folder)

    def make(size: str = "small", **settings: Any) -> Bench:
        layer = BlockLayer()
        settings = {"checksums": "full", "system": layer.system} | settings
        made.append(NvmeStore(folders, **settings))
        return Bench(layer, made[-1], folders[0], SIZES[size])

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


def test_what_a_call_refuses_is_named_and_leaves_nothing(
    make: Callable[..., Bench], golden: Golden, tmp_nvme: Path
) -> None:
    lines, advice = [], {}
    for size in SIZES:
        bench = make(size)
        for name, call, code in [
            (verb, call, code)
            for verb, calls in REFUSED.items()
            for call, codes in calls.items()
            for code in codes
        ]:
            verb = VERBS[name]
            deed = fail_after(code) if call == "close" else fail(code)
            # Of the second chunk only: the first may be written, or skipped.
            error = run(bench, verb, Rule(call, deed, path="*/c.1.0*"))
            assert error is not None and error.errno == code
            file = Path(error.filename)
            assert file.parents[1] == tmp_nvme / "arrays"
            assert error.strerror.startswith(verb.what)
            found, _, advised = error.strerror.partition(". ")
            lines.append(f"{size}, {name}, {call}, {file.name}: {found}")
            assert advice.setdefault(errno.errorcode[code], advised) == advised
            bench.expect_at_rest(is_there=name != "create")
            if name in ("replace", "write row", "read"):
                bench.expect_one_of(bench.old, bench.new)
        bench.expect_works()
        bench.store.close()
    lines += ["", *(f"{name}: {advised}" for name, advised in sorted(advice.items()))]
    golden.check("errors_of_calls.txt", "\n".join(lines))


@pytest.mark.parametrize("size", SIZES)
def test_a_drive_that_is_full_in_mid_write_is_named(
    make: Callable[..., Bench], size: str
) -> None:
    """Half of a chunk is written, then there is no more room."""
    bench = make(size)
    half = bench.size.chunk_bytes // 8192 * 4096 or bench.size.chunk_bytes // 2
    rules = (
        Rule("pwritev", fail(ENOSPC), when=lambda c: c.offset >= half),
        Rule("pwritev", move_at_most(half)),
    )
    for name in ("first write", "overwrite", "replace"):
        error = run(bench, VERBS[name], *rules)
        assert error is not None and error.errno == ENOSPC
        assert f"at byte {half:,}, of " in str(error)
        with pytest.raises(StorageError, match="its last write failed"):
            bench.read()
        bench.expect_at_rest()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "zinf-test", str(disk)]
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system: {error}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full_is_named_and_may_be_emptied(
    small_disk: Path,
) -> None:
    with benches(small_disk / "nvme") as make:
        bench = make("large")
        VERBS["replace"].prepare(bench)
        with pytest.raises(StorageError, match="Free space on that drive") as caught:
            bench.store.write(OTHER, np.ones(2**18, np.float32))
        assert caught.value.errno == ENOSPC
        bench.expect_at_rest()
        (small_disk / "rest").write_bytes(bytes(2**18))
        with pytest.raises(StorageError) as caught:
            bench.write(bench.new)
        assert caught.value.errno == ENOSPC
        bench.expect_at_rest()
        (small_disk / "rest").unlink()
        for link in bench.links:
            link.unlink()
        bench.write(bench.new)
        bench.expect(bench.new)


def test_one_of_two_drives_that_stalls_is_named_and_may_recover(
    tmp_path: Path,
) -> None:
    with (
        still("monotonic", drive, open_file) as clock,
        benches(tmp_path / "a", tmp_path / "b") as make,
    ):
        bench, gate = make(stall_seconds=0.2), Gate()
        bench.fill()
        spec = ArraySpec(bench.size.shape, "float32", 4)
        bench.store.create(OTHER, spec, rows_per_chunk=1)
        bench.store.write(OTHER, bench.old.copy()).result()
        assert {path.parents[2].name for path in bench.chunks} == {"a", "b"}
        stall = Rule("pwritev", gate, path="*/b/arrays/*")
        with bench.layer.broken(stall, is_cached=True):
            writing = bench.store.write(ARRAY, bench.new)
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
        bench.write(bench.new)
        bench.expect(bench.new)
        np.testing.assert_array_equal(bench.store.read(OTHER).result(), bench.old)
