"""Many threads, arrays that come and go, and any call may fail at any time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from errno import EAGAIN, EDQUOT, EINTR, EIO, EMFILE, ENOSPC
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.robustness.faults import (
    BlockLayer,
    Call,
    Rule,
    delay,
    fail,
    go_on,
    move_at_most,
    move_nothing,
    open_files,
)
from tests.robustness.faulty_store import eventually, threads_of
from zinf.memory import NvmeStore
from zinf.memory.nvme import Profile, save_profile
from zinf.memory.storage_error import StorageError
from zinf.program import ArrayId, ArraySpec, Role

NUM_ARRAYS, NUM_TURNS = 6, 60
# Small ones, and large ones with and without a rest that does not fill a page.
SHAPES = [(6, 4), (9, 1024), (20, 3301), (16, 8192)]
ERRORS = [EIO, ENOSPC, EDQUOT, EMFILE, EAGAIN, EINTR, EINTR]


@dataclass
class Chaos:
    """A deed: mostly what was asked, sometimes something else."""

    random: Random
    chance: float

    def __call__(self, call: Call) -> object:
        if self.random.random() > self.chance:
            return go_on(call)
        if call.name in ("preadv", "pwritev"):
            deeds = [move_nothing, move_at_most(self.random.randrange(1, 2**18))]
            deed = self.random.choice([*deeds, delay(0.001), self._fail()])
            return deed(call)
        return self._fail()(call)

    def _fail(self):
        return fail(self.random.choice(ERRORS))


class User:
    """Uses one array, and knows what its rows have to be; None: nothing is known."""

    def __init__(self, store: NvmeStore, folder: Path, number: int, seed: int) -> None:
        self.store = store
        self.folder = folder
        self.array = ArrayId(Role.PARAM, f"array {number}")
        self.random = Random(f"{seed} {number}")
        self.rows: list[np.ndarray | None] = []
        self.num_failures = self.num_checks = 0

    def turn(self) -> None:
        try:
            if not self.rows:
                self._create()
            else:
                deeds = [self._write, self._write_rows, self._read, self._link]
                self.random.choice([*deeds, self._read, self._write_rows])()
                if self.random.random() < 0.1:
                    self._free()
        except StorageError as error:
            assert "Cannot " in str(error)
            self.num_failures += 1

    def recover(self) -> None:
        """Everything works when nothing fails."""
        if not self.rows:
            self._create()
        self._write()
        self._read()
        assert all(row is not None for row in self.rows)

    def _create(self) -> None:
        shape = self.random.choice(SHAPES)
        rows_per_chunk = self.random.choice([None, shape[0] // 2, 3])
        spec = ArraySpec(shape, "float32", 4)
        self.store.create(self.array, spec, rows_per_chunk)
        self.shape = shape
        self.rows = [None] * shape[0]

    def _free(self) -> None:
        self.store.free(self.array)
        self.rows = []

    def _draw(self, num_rows: int) -> np.ndarray:
        drawn = np.random.default_rng(self.random.randrange(2**32))
        return drawn.standard_normal((num_rows, self.shape[1]), np.float32)

    def _write(self) -> None:
        self._write_at(self.array, 0, self._draw(self.shape[0]))

    def _write_rows(self) -> None:
        array, start, stop = self._some_rows()
        self._write_at(array, start, self._draw(stop - start))

    def _write_at(self, array: ArrayId, start: int, value: np.ndarray) -> None:
        stop = start + len(value)
        self.rows[start:stop] = [None] * len(value)
        self.store.write(array, value).result()
        self.rows[start:stop] = list(value)

    def _read(self) -> None:
        array, start, stop = self._some_rows()
        if self.random.random() < 0.5:
            array, start, stop = self.array, 0, self.shape[0]
        found = self.store.read(array).result()
        for row, expected in zip(found, self.rows[start:stop], strict=True):
            assert expected is not None, "a write failed, and what it left was read"
            np.testing.assert_array_equal(row, expected)
            self.num_checks += 1

    def _some_rows(self) -> tuple[ArrayId, int, int]:
        start, stop = sorted(self.random.sample(range(self.shape[0] + 1), 2))
        return replace(self.array, rows=(start, stop)), start, stop

    def _link(self) -> None:
        """As a checkpoint would."""
        for chunk in self.store.chunk_files(self.array):
            if chunk.is_file() and self.random.random() < 0.5:
                name = f"{self.array.path} {self.random.random()}"
                (self.folder / name).hardlink_to(chunk.resolve())


@pytest.fixture
def folders(tmp_nvme: Path) -> Iterator[list[Path]]:
    folders = [tmp_nvme / "a", tmp_nvme / "b"]
    for folder in (*folders, tmp_nvme / "links"):
        folder.mkdir()
        save_profile(Profile(mixed_bytes_per_second=1e9, num_threads=3), folder)
    yield folders
    eventually(lambda: not any(map(threads_of, folders)))
    assert open_files(tmp_nvme) == []


@pytest.mark.parametrize("chance", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_fails_no_wrong_byte_is_read(seed, chance, folders, tmp_nvme):
    layer = BlockLayer()
    store = NvmeStore(folders, checksums="full", system=layer.system)
    links = tmp_nvme / "links"
    users = [User(store, links, number, seed) for number in range(NUM_ARRAYS)]

    def use(user: User) -> None:
        for _ in range(NUM_TURNS):
            user.turn()

    calls = "open open_cached preadv pwritev allocate replace stat unlink"
    with layer.broken(Rule(calls, Chaos(Random(seed), chance)), is_cached=True):
        with ThreadPoolExecutor(NUM_ARRAYS) as pool:
            list(pool.map(use, users))
    assert sum(user.num_checks for user in users)
    for user in users:
        user.recover()
    held_bytes = sum(4 * user.shape[0] * user.shape[1] for user in users)
    assert store.ledger.used_bytes == held_bytes
    store.close()
