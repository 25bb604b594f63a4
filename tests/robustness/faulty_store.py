"""A store on a faulty drive, what can be asked of it, and what must hold after that."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.robustness.faults import (
    SECONDS_TO_WAIT,
    BlockLayer,
    Rule,
    eventually,
    open_files,
    threads_of,
)
from zinf.memory import NvmeStore
from zinf.memory.nvme import Profile, save_profile
from zinf.memory.nvme.profile import PROFILE
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


@contextmanager
def benches(folder: Path) -> Iterator[Callable[..., Bench]]:
    """Makes benches in `folder`; nothing may be left of them in the end."""
    made: list[NvmeStore] = []

    def make(
        size: str = "small", *, paths: Sequence[Path] = (), **settings: Any
    ) -> Bench:
        layer = BlockLayer()
        for path in paths or [folder]:
            path.mkdir(exist_ok=True)
            # Drives are taken for equally fast, without measuring them.
            profile = Profile(mixed_bytes_per_second=1e9, num_threads=2)
            if not (path / PROFILE).exists():
                save_profile(profile, path)
        settings = {"checksums": "full", "system": layer.system} | settings
        made.append(NvmeStore(paths or [folder], **settings))
        return Bench(layer, made[-1], folder, SIZES[size])

    yield make
    for store in made:
        store.close()
    eventually(lambda: not threads_of(folder))
    assert open_files(folder) == []
