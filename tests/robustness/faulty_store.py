"""A store on a faulty drive, what can be asked of it, and what must hold after that."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from tests.robustness.faults import SECONDS_TO_WAIT, BlockLayer, Rule, open_files
from zinf.memory import NvmeStore
from zinf.memory.nvme import Profile, save_profile
from zinf.memory.nvme.profile import PROFILE
from zinf.memory.storage_error import ADVICE, OTHER_ADVICE, SAME_ADVICE, StorageError
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
        """One in the middle of the second chunk."""
        return self.rows_per_chunk + 1

    @property
    def chunk_bytes(self) -> int:
        return self.rows_per_chunk * self.shape[1] * 4


# Chunks of 48 bytes go through the page cache; 64 pages of the larger ones do not, and
# what is left of them does.
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

    def create(self) -> None:
        spec = ArraySpec(self.size.shape, "float32", 4)
        self.store.create(ARRAY, spec, rows_per_chunk=self.size.rows_per_chunk)

    def fill(self) -> None:
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

    def link(self) -> None:
        for chunk, link in zip(self.chunks, self.links, strict=True):
            os.link(chunk, link)

    def expect_links(self) -> None:
        """What was linked is as it was."""
        found = b"".join(link.read_bytes() for link in self.links if link.exists())
        assert found in (b"", self.old.tobytes())

    def expect_one_of(self, *allowed: np.ndarray) -> None:
        """Reading raises what it should, or gives one of the arrays, whole."""
        try:
            found = self.read()
        except StorageError:
            return
        assert any(np.array_equal(found, value) for value in allowed)


@dataclass(frozen=True)
class Verb:
    """Something to ask of a bench.

    Args:
        prepare: while all is well.
        run: what may fail; raises AssertionError if what it gives is wrong.
        result: what is read after it succeeded.
        what: begins the message of what it raises.
    """

    prepare: Callable[[Bench], None]
    run: Callable[[Bench], None]
    result: Callable[[Bench], np.ndarray]
    what: str


def _read(bench: Bench) -> None:
    np.testing.assert_array_equal(bench.read(), bench.old)


def _overwrite(bench: Bench) -> None:
    bench.write(bench.new)


def _write_row(bench: Bench) -> None:
    rows = (bench.size.row, bench.size.row + 1)
    value = bench.new[slice(*rows)].copy()
    bench.store.write(replace(ARRAY, rows=rows), value).result(SECONDS_TO_WAIT)


def _write_first(bench: Bench) -> None:
    bench.write(bench.old)


def _fill_and_link(bench: Bench) -> None:
    bench.fill()
    bench.link()


def _with_new_row(bench: Bench) -> np.ndarray:
    value = bench.old.copy()
    value[bench.size.row] = bench.new[bench.size.row]
    return value


VERBS = {
    "read": Verb(Bench.fill, _read, lambda b: b.old, "Cannot read param/blocks/kernel"),
    "overwrite": Verb(
        Bench.fill, _overwrite, lambda b: b.new, "Cannot write param/blocks/kernel"
    ),
    "replace": Verb(
        _fill_and_link, _overwrite, lambda b: b.new, "Cannot write param/blocks/kernel"
    ),
    "write row": Verb(
        Bench.fill, _write_row, _with_new_row, "Cannot write param/blocks/kernel["
    ),
    "first write": Verb(
        Bench.create, _write_first, lambda b: b.old, "Cannot write param/blocks/kernel"
    ),
    "create": Verb(
        lambda bench: None,
        Bench.create,
        lambda b: b.old,
        "Cannot create param/blocks/kernel",
    ),
}


def run(bench: Bench, verb: Verb, *rules: Rule) -> StorageError | None:
    """What `verb` raises while `rules` hold."""
    with bench.layer.broken(*rules):
        try:
            verb.run(bench)
        except StorageError as error:
            return error
    return None


def expect_named(error: StorageError, verb: Verb, code: int, folder: Path) -> None:
    """The error says what was asked, what was found, where, and what to change."""
    assert error.errno == code
    assert error.filename.startswith(f"{folder}/arrays/")
    message = str(error)
    assert message.startswith(f"[Errno {code}] {verb.what}")
    assert ADVICE.get(SAME_ADVICE.get(code, code), OTHER_ADVICE) in message


def expect_at_rest(bench: Bench, *, is_there: bool = True) -> None:
    """Nothing is under way or open, and the ledger counts what is there."""
    bench.store._flush()
    eventually(lambda: not open_files(bench.folder / "arrays"))
    assert bench.store.contains(ARRAY) == is_there
    expected = bench.size.chunk_bytes * 2 if is_there else 0
    assert bench.store.ledger.used_bytes == expected


def expect_works(bench: Bench, verb: Verb) -> None:
    """The same succeeds now, with the right bytes, and so does all else."""
    if verb is VERBS["write row"]:
        # What failed in place has to be written as a whole before a part of it is.
        bench.write(bench.old)
    verb.run(bench)
    if verb.run is Bench.create:
        _write_first(bench)
    np.testing.assert_array_equal(bench.read(), verb.result(bench))
    for value in (bench.new, bench.old):
        bench.write(value)
        np.testing.assert_array_equal(bench.read(), value)
    expect_at_rest(bench)


def eventually(is_so: Callable[[], Any]) -> None:
    """Wait for what other threads are about to do."""
    deadline = monotonic() + SECONDS_TO_WAIT
    while not is_so():
        assert monotonic() < deadline
        sleep(0.002)


def threads_of(folder: Path) -> list[str]:
    """The threads of the drive that moves the files of `folder`."""
    names = [t.name for t in threading.enumerate()]
    return [n for n in names if n.startswith("nvme") and n.endswith(f" {folder.name}")]


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
            # They are taken for equally fast, without measuring them.
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
