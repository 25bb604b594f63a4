import errno
import os
import resource
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from zinf.memory import BudgetExceeded, NvmeStore, StorageError
from zinf.memory.chunk import MAX_CHUNK_BYTES
from zinf.program import ArrayId, ArraySpec

WHOLE = ArrayId("param", "blocks/kernel")
SPEC = ArraySpec((6, 4), "float32", 4)
VALUE = np.arange(24, dtype=np.float32).reshape(6, 4)


def rows(start: int, stop: int) -> ArrayId:
    return ArrayId("param", "blocks/kernel", rows=(start, stop))


@pytest.fixture
def filled(nvme: NvmeStore) -> NvmeStore:
    """A store with VALUE in chunks of two rows."""
    nvme.create(WHOLE, SPEC, rows_per_chunk=2)
    nvme.write(WHOLE, VALUE.copy()).result()
    return nvme


def chunk_file(store: NvmeStore, index: int) -> Path:
    return store.folder(WHOLE) / f"c.{index}.0"


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Make the kernel refuse larger files, as it does when a drive is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_create_counts_the_bytes_before_anything_is_written(nvme: NvmeStore) -> None:
    nvme.create(WHOLE, SPEC)
    assert nvme.ledger.used_bytes == SPEC.nbytes
    nvme.write(WHOLE, VALUE).result()
    assert nvme.ledger.used_bytes == SPEC.nbytes
    nvme.free(WHOLE)
    assert nvme.ledger.used_bytes == 0


def test_create_over_the_budget_makes_no_folder(tmp_nvme: Path) -> None:
    store = NvmeStore([tmp_nvme], SPEC.nbytes - 1)
    with pytest.raises(BudgetExceeded):
        store.create(WHOLE, SPEC)
    assert not (tmp_nvme / "param").exists()
    store.close()


def test_an_array_cannot_be_created_twice(filled: NvmeStore) -> None:
    with pytest.raises(ValueError, match="already"):
        filled.create(WHOLE, SPEC)
    assert filled.ledger.used_bytes == SPEC.nbytes


def test_a_dtype_that_zarr_cannot_keep_is_refused(nvme: NvmeStore) -> None:
    with pytest.raises(StorageError, match="Cannot create param/blocks/kernel.*uint4"):
        nvme.create(WHOLE, ArraySpec((4,), "uint4", 1))
    assert nvme.ledger.used_bytes == 0
    assert not nvme.contains(WHOLE)


def test_a_leaf_lies_in_the_folder_of_its_role_and_path(
    filled: NvmeStore, tmp_nvme: Path
) -> None:
    assert filled.folder(WHOLE) == tmp_nvme / "param" / "blocks" / "kernel"
    assert filled.folder(rows(0, 2)) == filled.folder(WHOLE)
    with pytest.raises(KeyError):
        filled.folder(ArrayId("param", "missing"))


def test_rows_can_be_written_before_the_whole_is(nvme: NvmeStore) -> None:
    nvme.create(WHOLE, SPEC, rows_per_chunk=2)
    for start in range(6):
        nvme.write(rows(start, start + 1), VALUE[start : start + 1]).result()
    np.testing.assert_array_equal(nvme.read(WHOLE).result(), VALUE)


def test_what_was_never_written_is_an_error_and_not_zeros(nvme: NvmeStore) -> None:
    nvme.create(WHOLE, SPEC, rows_per_chunk=2)
    nvme.write(rows(0, 3), VALUE[:3]).result()
    for array in (WHOLE, rows(2, 4), rows(3, 4), rows(4, 6)):
        with pytest.raises(StorageError, match="never") as error:
            nvme.read(array)
        assert error.value.errno == errno.ENODATA
        assert str(array) in str(error.value)
    np.testing.assert_array_equal(nvme.read(rows(0, 3)).result(), VALUE[:3])


def test_zeros_are_files_too(nvme: NvmeStore) -> None:
    nvme.create(WHOLE, SPEC, rows_per_chunk=2)
    nvme.write(WHOLE, np.zeros_like(VALUE)).result()
    assert [chunk_file(nvme, index).stat().st_size for index in range(3)] == [
        2 * 4 * 4
    ] * 3


@pytest.mark.parametrize("size", [0, 10, 31, 33])
def test_a_chunk_file_of_the_wrong_size_is_an_error(
    filled: NvmeStore, size: int
) -> None:
    os.truncate(chunk_file(filled, 1), size)
    for array in (WHOLE, rows(2, 3)):
        with pytest.raises(StorageError, match="Cannot read param/blocks") as error:
            filled.read(array).result()
        assert error.value.errno == errno.EIO
        assert error.value.filename == str(chunk_file(filled, 1))
    with pytest.raises(StorageError, match="Cannot write"):
        filled.write(rows(2, 3), VALUE[2:3]).result()
    np.testing.assert_array_equal(filled.read(rows(0, 2)).result(), VALUE[:2])


def test_a_missing_chunk_file_is_an_error(filled: NvmeStore) -> None:
    os.remove(chunk_file(filled, 1))
    for array in (WHOLE, rows(3, 5)):
        with pytest.raises(StorageError, match="Cannot read.*resume") as error:
            filled.read(array).result()
        assert error.value.errno == errno.ENOENT
        assert error.value.filename == str(chunk_file(filled, 1))
    with pytest.raises(StorageError, match="Cannot write"):
        filled.write(rows(3, 4), VALUE[3:4])
    filled.write(rows(2, 4), VALUE[2:4]).result()
    np.testing.assert_array_equal(filled.read(WHOLE).result(), VALUE)


def test_a_full_drive_fails_the_write_and_keeps_the_old_content(
    nvme: NvmeStore,
) -> None:
    value = np.zeros(100_000, np.float32)
    nvme.write(WHOLE, value).result()
    with files_of_at_most(200_000):
        failed = nvme.write(WHOLE, value + 1)
        wait([failed])
    with pytest.raises(StorageError, match="Cannot write.*Free space") as error:
        failed.result()
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(nvme.folder(WHOLE) / "c.0")
    assert nvme.written_bytes == value.nbytes
    np.testing.assert_array_equal(nvme.read(WHOLE).result(), value)


def test_a_file_in_the_way_of_a_folder_is_an_error(
    nvme: NvmeStore, tmp_nvme: Path
) -> None:
    nvme.write(ArrayId("param", "a"), VALUE).result()
    (tmp_nvme / "grad").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="Cannot create grad/b.*nothing else"):
        nvme.write(ArrayId("grad", "b"), VALUE)
    assert nvme.ledger.used_bytes == VALUE.nbytes
    (tmp_nvme / "grad").unlink()
    nvme.write(ArrayId("grad", "b"), VALUE).result()


def test_counters_hold_the_bytes_of_finished_reads_and_writes(
    filled: NvmeStore,
) -> None:
    filled.read(WHOLE).result()
    filled.read(rows(1, 2)).result()
    filled.write(rows(0, 2), VALUE[:2]).result()
    assert filled.read_bytes == SPEC.nbytes + 1 * 4 * 4
    assert filled.written_bytes == SPEC.nbytes + 2 * 4 * 4


def test_an_array_larger_than_a_chunk_is_cut_into_files(nvme: NvmeStore) -> None:
    value = np.zeros((5, MAX_CHUNK_BYTES // 8), np.float32)  # Rows of half a chunk.
    value[:] = np.arange(5)[:, None]
    nvme.write(WHOLE, value.copy()).result()
    files = list(nvme.folder(WHOLE).glob("c.*"))
    assert len(files) == 5
    assert {file.stat().st_size for file in files} == {MAX_CHUNK_BYTES // 2}
    np.testing.assert_array_equal(nvme.read(WHOLE).result(), value)


def test_arrays_are_dealt_to_the_folder_with_the_fewest_bytes(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "ab"]
    store = NvmeStore(roots)
    placed = []
    for name, numel in [("w", 6), ("x", 1), ("y", 1), ("z", 4), ("v", 1)]:
        array = ArrayId("param", name)
        store.write(array, np.zeros(numel, np.float32)).result()
        placed.append(store.folder(array).relative_to(tmp_path).parts[0])
    # Bytes in a, b before each: 0 0, 6 0, 6 1, 6 2, 6 6.
    assert placed == ["a", "b", "b", "b", "a"]
    store.free(ArrayId("param", "w"))
    store.write(ArrayId("grad", "w"), VALUE).result()
    assert store.folder(ArrayId("grad", "w")).is_relative_to(roots[0])
    store.close()


def test_many_arrays_can_be_under_way_at_once(nvme: NvmeStore) -> None:
    arrays = [ArrayId("param", f"blocks/{i}/w") for i in range(50)]
    values = [np.full((3, 5), i, np.float32) for i in range(50)]
    writes = [nvme.write(*pair) for pair in zip(arrays, values, strict=True)]
    assert all(write.result() is None for write in writes)
    for value, read in zip(values, [nvme.read(array) for array in arrays], strict=True):
        np.testing.assert_array_equal(read.result(), value)


def test_clear_deletes_the_arrays_and_their_folders(
    filled: NvmeStore, tmp_nvme: Path
) -> None:
    filled.write(ArrayId("grad", "a"), VALUE)
    filled.clear()
    assert filled.ledger.used_bytes == 0
    assert not filled.contains(WHOLE)
    assert {path.name for path in tmp_nvme.iterdir()} == {"zinf.json", "zinf.lock"}
    filled.write(WHOLE, VALUE).result()


def test_close_waits_for_what_is_under_way_and_lets_go_of_the_folder(
    tmp_nvme: Path,
) -> None:
    store = NvmeStore([tmp_nvme])
    pending = [store.write(ArrayId("param", f"{i}"), VALUE) for i in range(20)]
    store.close()
    assert all(write.done() for write in pending)
    assert len(list((tmp_nvme / "param").glob("*/c.0.0"))) == 20
    NvmeStore([tmp_nvme]).close()


def test_one_bad_folder_leaves_the_others_unlocked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        NvmeStore([tmp_path / "good", tmp_path / "file"])
    NvmeStore([tmp_path / "good"]).close()


def test_check_space_asks_for_the_folders_of_the_store(nvme: NvmeStore) -> None:
    nvme.check_space(1)
    with pytest.raises(StorageError, match="free"):
        nvme.check_space(2**60)
