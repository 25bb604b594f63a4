"""Shares of any number of processes make one checkpoint, and any other number reads it.

Processes are taken in turn here; tests/distributed has real ones.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
import pytest

from tests.unit.checkpoint.cases import specs_of
from zinf.checkpoint import read_arrays
from zinf.checkpoint.grid import Index
from zinf.checkpoint.save import Save
from zinf.checkpoint.saved import Saved
from zinf.checkpoint.share import shares_of
from zinf.checkpoint.source import FileSource
from zinf.core.memory import open_stores
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, ArraySpec, Role, Tier
from zinf.core.sharding import Box, intersection

# One process and several from each tier, and what divides few of the arrays.
SAVED = ((1, Tier.NVME), (2, Tier.HOST), (5, Tier.HOST), (5, Tier.NVME))
# Process, of how many, to which tier.
RESTORED = ((0, 1, Tier.NVME), (3, 4, Tier.NVME), (0, 5, Tier.HOST), (4, 5, Tier.HOST))
# By array: shape, the dim that processes cut, and the rows of a chunk on nvme.
ARRAYS: dict[str, tuple[tuple[int, ...], int | None, int | None]] = {
    "rows": ((10, 3), 0, None),
    "prime rows": ((13, 5), 0, None),
    "fewer rows than processes": ((3, 4), 0, None),
    "columns": ((6, 11), 1, None),
    "rows of blocks": ((40, 2**16), 0, 2),
    # 7 has no divisor in common with the rows of a share: it is on no common grid.
    "rows of awkward blocks": ((40, 2**16), 0, 7),
    "several chunks": ((8, 2**19), 0, None),
    "chunks within a row": ((1, 5 * 2**20), 1, None),
    "everybody's": ((4, 2), None, None),
    "scalar": ((), None, None),
}


@dataclass(frozen=True)
class Part:
    """The layout of an array of which a process keeps a part."""

    padded: tuple[int, ...]
    box: Box
    cut_dims: frozenset[int]
    keepers: tuple[int, ...]

    @property
    def share_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def has_whole_rows(self) -> bool:
        return bool(self.padded) and 0 not in self.cut_dims

    def take(self, content: np.ndarray) -> np.ndarray:
        missing = zip(self.padded, content.shape, strict=True)
        padding = [(0, padded - size) for padded, size in missing]
        whole = np.pad(content, padding) if padding else content
        return whole[tuple(slice(*edges) for edges in self.box)]


@dataclass(frozen=True)
class Parts:
    """The layouts of all arrays for process `index` of `count`."""

    index: int
    count: int
    parts = MappingProxyType({})  # No exchange lost anything.

    def of(self, array: ArrayId) -> Part:
        shape, dim, _ = ARRAYS[array.path]
        padded, box = list(shape), [(0, size) for size in shape]
        if dim is None or self.count == 1:
            return Part(shape, tuple(box), frozenset(), tuple(range(self.count)))
        length = -(-shape[dim] // self.count)
        padded[dim] = length * self.count
        box[dim] = self.index * length, (self.index + 1) * length
        return Part(tuple(padded), tuple(box), frozenset({dim}), (self.index,))

    @property
    def specs(self) -> dict[ArrayId, ArraySpec]:
        return specs_of(contents())

    def share(self, array: ArrayId) -> ArraySpec:
        return replace(self.specs[array], shape=self.of(array).share_shape)


@cache
def contents() -> dict[ArrayId, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        ArrayId(Role.PARAM, name): random.standard_normal(shape, np.float32)
        for name, (shape, _, _) in ARRAYS.items()
    }


def opened(
    folder: Path,
    arrays: Mapping[ArrayId, np.ndarray],
    index: int,
    count: int,
    tier: Tier,
) -> Residents:
    stores = open_stores(jax.devices()[0], nvme_paths=[folder / f"{count}-{index}"])
    parts = Parts(index, count)
    homes = dict.fromkeys(arrays, tier)
    residents = Residents(stores, parts, homes)  # pyrefly: ignore
    residents.create({a: ARRAYS[a.path][2] for a in arrays})
    for array, value in arrays.items():
        residents.write_share(array, np.array(parts.of(array).take(value)))
    return residents


@pytest.fixture(scope="module", params=SAVED)
def saved(request, tmp_path_factory):
    """`(folder, arrays)` of a checkpoint by so many processes, from a tier."""
    count, tier = request.param
    folder = tmp_path_factory.mktemp("shares")
    directory, arrays = folder / "saved", contents()
    directory.mkdir()
    saves = []
    for index in range(count):
        residents = opened(folder, arrays, index, count, tier)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "process_index", lambda index=index: index)
            save = Save(directory, residents, shares_of(residents))
            save.begin()
            save.finish()
        saves.append(save)
        if tier == Tier.NVME:
            linked = {x.share.array.path for x in save.snapshot.linked}
            assert ("rows of awkward blocks" in linked) == (count == 1)
            assert "rows of blocks" in linked
        residents.stores.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: count)
        saves[0].commit({}, None)
    return directory, arrays


def test_shares_make_one_checkpoint(saved):
    directory, arrays = saved
    with Saved(directory) as found:
        assert list(found.verify()) == []
        for array, value in arrays.items():
            assert found.read(array).tobytes() == value.tobytes(), array
    assert not list(directory.glob("part-*")) and not list(directory.glob("links-*"))


def test_every_process_restores_its_share(saved, tmp_path):
    directory, arrays = saved
    blank = {a: np.zeros_like(x) for a, x in arrays.items()}
    for index, count, tier in RESTORED:
        residents = opened(tmp_path, blank, index, count, tier)
        read_arrays(directory, residents)
        for array, value in arrays.items():
            expected = Parts(index, count).of(array).take(value)
            np.testing.assert_array_equal(residents.read_share(array), expected)
        residents.stores.close()


def test_a_process_reads_no_file_that_it_needs_not_and_none_twice(
    saved, tmp_path, monkeypatch
):
    directory, arrays = saved
    read: Counter[tuple[ArrayId, Index]] = Counter()
    take = FileSource._open

    def counted(source: FileSource, index: Index, *rest: object) -> object:
        read[source.array, index] += 1
        return take(source, index, *rest)

    monkeypatch.setattr(FileSource, "_open", counted)
    residents = opened(tmp_path, arrays, 1, 4, Tier.HOST)
    read_arrays(directory, residents)
    residents.stores.close()
    with Saved(directory) as found:
        needed = {
            (array, index)
            for array in arrays
            for index in found.grid(array).indices()
            if intersection(found.grid(array).box(index), Parts(1, 4).of(array).box)
            is not None
        }
    assert set(read) == needed
    assert set(read.values()) == {1}
