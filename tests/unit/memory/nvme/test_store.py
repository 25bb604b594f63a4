"""The store: what `tests/unit/memory/test_store.py` does not show of all tiers."""

import json
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from errno import EAGAIN, EIO, ENODATA

import numpy as np
import pytest
import zarr

from tests.robustness.faults import Rule, eventually, fail, open_files, threads_of
from zinf.core.memory import BudgetExceeded, NvmeStore, StorageError
from zinf.core.memory.nvme import Profile, save_profile
from zinf.core.memory.nvme.open_file import DIRECT_FROM_BYTES
from zinf.core.program import ArrayId, ArraySpec, Role

WHOLE = ArrayId(Role.PARAM, "blocks/kernel")
OTHER = ArrayId(Role.GRADIENT, "b")
SPEC = ArraySpec((6, 4), "float32", 4)
VALUE = np.arange(24, dtype=np.float32).reshape(6, 4)


def rows(start: int, stop: int) -> ArrayId:
    return replace(WHOLE, rows=(start, stop))


def expect(store: NvmeStore, array: ArrayId, value: np.ndarray) -> None:
    np.testing.assert_array_equal(store.read(array).result(), value)


@pytest.fixture
def store(tmp_nvme, layer) -> Iterator[NvmeStore]:
    """A store with VALUE in chunks of two rows."""
    store = NvmeStore([tmp_nvme], system=layer.system)
    store.create(WHOLE, SPEC, rows_per_chunk=2)
    store.write(WHOLE, VALUE.copy()).result()
    yield store
    store.close()


def test_create_counts_the_bytes_before_anything_is_written(tmp_nvme):
    store = NvmeStore([tmp_nvme], SPEC.nbytes)
    store.create(WHOLE, SPEC)
    assert store.ledger.used_bytes == SPEC.nbytes
    with pytest.raises(ValueError, match="already"):
        store.create(WHOLE, SPEC)
    with pytest.raises(BudgetExceeded):
        store.create(OTHER, ArraySpec((1,), "uint8", 1))
    assert len(os.listdir(tmp_nvme / "arrays")) == 1
    store.free(WHOLE)
    assert store.ledger.used_bytes == 0
    with pytest.raises(StorageError, match="Cannot create param/blocks/kernel.*uint4"):
        store.create(WHOLE, ArraySpec((4,), "uint4", 1))
    assert store.ledger.used_bytes == 0 and not store.contains(WHOLE)
    store.close()


def test_an_array_lies_in_a_folder_with_a_short_id_that_an_index_explains(
    store, tmp_nvme
):
    folder = tmp_nvme / "arrays" / "000001"
    assert store.folder(WHOLE) == store.folder(rows(0, 2)) == folder
    names = ["c.0.0", "c.1.0", "c.2.0"]
    assert [path.name for path in store.chunk_files(WHOLE)] == names
    for missing in (store.folder, store.chunks, store.read, store.free):
        with pytest.raises(KeyError, match="missing"):
            missing(ArrayId(Role.PARAM, "missing"))
    (line,) = (tmp_nvme / "zinf.index.jsonl").read_text().splitlines()
    expected = {"name": "000001", "array": str(WHOLE), "dtype": "float32"}
    assert json.loads(line) == expected | {"shape": [6, 4]}


def test_any_path_of_a_leaf_can_be_kept(store):
    for path in ("", "a//b", "../../x", "a/c.0", "a/zarr.json", "/etc", "Ü " * 99):
        arrays = [ArrayId(Role.PARAM, path), ArrayId(Role.GRADIENT, path, (1, 2), 0)]
        for number, array in enumerate(arrays):
            store.write(array, VALUE + number).result()
            expect(store, array, VALUE + number)


def test_what_was_never_written_is_an_error_and_not_zeros(store):
    store.free(WHOLE)
    store.create(WHOLE, SPEC, rows_per_chunk=2)
    store.write(rows(0, 3), VALUE[:3]).result()
    for array in (WHOLE, rows(2, 4), rows(3, 4)):
        for ask, verb in ((store.read, "read"), (store.chunks, "link")):
            with pytest.raises(StorageError, match="it was never") as error:
                ask(array)
            assert f"Cannot {verb} {array}: " in str(error.value)
            assert error.value.errno == ENODATA
    expect(store, rows(0, 3), VALUE[:3])


def test_rows_that_fail_leave_the_rows_of_other_files(store, layer):
    with layer.broken(Rule("pwritev", fail(EIO))), pytest.raises(StorageError):
        store.write(rows(2, 3), -VALUE[2:3]).result()
    expect(store, rows(0, 2), VALUE[:2])
    for array in (WHOLE, rows(2, 3), rows(3, 4)):
        with pytest.raises(StorageError, match="last write"):
            store.read(array).result()
    with pytest.raises(StorageError, match="last write"):
        store.write(rows(3, 4), VALUE[3:4]).result()
    store.write(rows(2, 4), -VALUE[2:4]).result()
    expect(store, rows(2, 4), -VALUE[2:4])
    # Only what was finished is counted.
    assert store.read_bytes == (2 + 2) * 4 * 4
    assert store.written_bytes == SPEC.nbytes + 2 * 4 * 4


def test_a_file_in_the_way_of_a_folder_is_an_error(store, tmp_nvme):
    (tmp_nvme / "arrays" / "000002").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="Cannot create gradient/b.*nothing else"):
        store.write(OTHER, VALUE)
    assert store.ledger.used_bytes == VALUE.nbytes
    store.write(OTHER, VALUE).result()


def test_chunks_are_dealt_over_the_folders(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
        save_profile(Profile(mixed_bytes_per_second=1e9), path)
    store = NvmeStore(paths)
    store.create(WHOLE, SPEC, rows_per_chunk=1)
    store.write(WHOLE, VALUE.copy()).result()
    homes = [path.relative_to(tmp_path).parts[0] for path in store.chunk_files(WHOLE)]
    assert homes.count("a") == homes.count("b") == 3
    for _, chunk in store.chunks(rows(1, 4)):
        home = chunk.path.parents[2]
        assert store.drive(chunk).folder == home
        assert store.scratch(chunk, "links") == home / ".zinf-links"
    expect(store, rows(1, 4), VALUE[1:4])
    found = zarr.open_array(store.folder(WHOLE), mode="r")
    np.testing.assert_array_equal(np.asarray(found[...]), VALUE)
    store.close()
    with pytest.raises(StorageError, match="is a file"):
        NvmeStore([paths[0], paths[1] / "zinf.lock"])
    NvmeStore(paths).close()  # The first folder was unlocked.


def test_an_array_written_after_a_free_is_not_overtaken(nvme):
    for _ in range(30):
        first = nvme.write(WHOLE, np.full(300_000, 1, np.uint8))
        nvme.free(WHOLE)
        second = nvme.write(OTHER, np.full(300_000, 2, np.uint8))
        first.exception(), second.result()
        assert np.unique(nvme.read(OTHER).result()).tolist() == [2]
        nvme.free(OTHER)


def test_clear_deletes_the_arrays_and_their_folders(store, tmp_nvme):
    store.write(OTHER, VALUE)
    store.clear()
    assert store.ledger.used_bytes == 0
    assert not store.contains(WHOLE)
    assert os.listdir(tmp_nvme / "arrays") == []
    store.write(WHOLE, VALUE).result()


def test_close_waits_for_what_is_under_way_and_lets_go_of_the_folder(tmp_nvme):
    store = NvmeStore([tmp_nvme])
    with pytest.raises(StorageError, match="in use by another engine of this process"):
        NvmeStore([tmp_nvme])
    pending = [store.write(ArrayId(Role.PARAM, f"{i}"), VALUE) for i in range(20)]
    store.close()
    assert all(write.done() for write in pending)
    assert len(list((tmp_nvme / "arrays").glob("*/c.0.0"))) == 20
    assert threads_of(tmp_nvme) == open_files(tmp_nvme) == []
    store.close()
    NvmeStore([tmp_nvme]).close()


def test_only_small_reads_of_what_is_cached_are_answered_by_the_caller(store, layer):
    me = threading.current_thread().name
    layer.transfers.clear()
    assert store.read(WHOLE).done()
    assert [t.thread for t in layer.transfers] == [me] * 3
    layer.transfers.clear()
    uncached = Rule("preadv", fail(EAGAIN), when=lambda c: len(c.arguments) > 3)
    with layer.broken(uncached, is_cached=True):
        expect(store, WHOLE, VALUE)
    assert layer.transfers[0].thread == me
    assert all(t.thread.startswith("nvme read") for t in layer.transfers[1:])
    # A row of a chunk is read with the whole chunk.
    store.write(OTHER, np.ones((2, DIRECT_FROM_BYTES // 8), np.float32)).result()
    layer.transfers.clear()
    store.read(replace(OTHER, rows=(1, 2))).result()
    assert all(t.thread.startswith("nvme read") for t in layer.transfers)


def test_what_is_done_holds_no_memory_and_what_was_read_is_the_callers(nvme):
    value = np.ones((2, DIRECT_FROM_BYTES), np.uint8)
    kept = [weakref.ref(value)]
    nvme.write(WHOLE, value).result()
    del value
    for array in (WHOLE, rows(0, 2)):
        found = nvme.read(array).result()
        assert found.ctypes.data % 64 == 0
        found[...] = 0
        kept.append(weakref.ref(found))
        del found
    assert nvme.read(WHOLE).result().all()
    eventually(lambda: all(memory() is None for memory in kept))


def test_big_endian_arrays_keep_their_values(nvme):
    nvme.write(WHOLE, VALUE.astype(">f4")).result()
    expect(nvme, WHOLE, VALUE)


def test_check_space_asks_for_the_folders_of_the_store(nvme):
    nvme.check_space(1)
    with pytest.raises(StorageError, match="free"):
        nvme.check_space(2**60)
