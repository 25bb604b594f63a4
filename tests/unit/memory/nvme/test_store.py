import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zarr

from tests.unit.memory.nvme.conftest import (
    SECONDS_TO_WAIT,
    Gate,
    Kernel,
    eventually,
    open_files,
    threads_of,
)
from zinf.memory import BudgetExceeded, NvmeStore, StorageError
from zinf.memory.chunk import MAX_CHUNK_BYTES
from zinf.memory.nvme import Coverage, Profile, System, save_profile
from zinf.program import ArrayId, ArraySpec, Role

WHOLE = ArrayId(Role.PARAM, "blocks/kernel")
SPEC = ArraySpec((6, 4), "float32", 4)
VALUE = np.arange(24, dtype=np.float32).reshape(6, 4)


def rows(start: int, stop: int) -> ArrayId:
    return ArrayId(Role.PARAM, "blocks/kernel", rows=(start, stop))


@pytest.fixture
def filled(nvme: NvmeStore) -> NvmeStore:
    """A store with VALUE in chunks of two rows."""
    nvme.create(WHOLE, SPEC, rows_per_chunk=2)
    nvme.write(WHOLE, VALUE.copy()).result()
    return nvme


def chunk_file(store: NvmeStore, index: int) -> Path:
    return store.chunk_files(WHOLE)[index]


def two_folders(tmp_path: Path) -> list[Path]:
    """Folders on drives that are known to be equally fast."""
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
        save_profile(Profile(mixed_bytes_per_second=1e9), path)
    return paths


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
    assert os.listdir(tmp_nvme / "arrays") == []
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


def test_an_array_lies_in_a_folder_with_a_short_id_that_an_index_explains(
    filled: NvmeStore, tmp_nvme: Path
) -> None:
    assert filled.folder(WHOLE) == tmp_nvme / "arrays" / "000001"
    assert filled.folder(rows(0, 2)) == filled.folder(WHOLE)
    names = [path.name for path in filled.chunk_files(WHOLE)]
    assert names == ["c.0.0", "c.1.0", "c.2.0"]
    with pytest.raises(KeyError):
        filled.folder(ArrayId(Role.PARAM, "missing"))
    entries = [
        json.loads(line)
        for line in (tmp_nvme / "zinf.index.jsonl").read_text().splitlines()
    ]
    expected = {"name": "000001", "array": str(WHOLE), "dtype": "float32"}
    assert entries == [expected | {"shape": [6, 4]}]


@pytest.mark.parametrize(
    "path", ["", "a//b", "../../x", "a/c.0", "a/zarr.json", "/etc", "Ünicode " * 50]
)
def test_any_path_of_a_leaf_can_be_kept(nvme: NvmeStore, path: str) -> None:
    for number, array in enumerate(
        [ArrayId(Role.PARAM, path), ArrayId(Role.GRADIENT, path, (1, 2), 0)]
    ):
        nvme.write(array, VALUE + number).result()
        np.testing.assert_array_equal(nvme.read(array).result(), VALUE + number)


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
        filled.write(rows(3, 4), VALUE[3:4]).result()
    filled.write(rows(2, 4), VALUE[2:4]).result()
    np.testing.assert_array_equal(filled.read(WHOLE).result(), VALUE)


def test_a_write_that_fails_cannot_be_read_until_it_is_written_again(
    nvme: NvmeStore,
) -> None:
    value = np.zeros(100_000, np.float32)
    nvme.write(WHOLE, value).result()
    with files_of_at_most(50 * 4096):
        failed = nvme.write(WHOLE, value + 1)
        wait([failed])
    with pytest.raises(StorageError, match="Cannot write.*Free space") as error:
        failed.result()
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(nvme.folder(WHOLE) / "c.0")
    assert nvme.written_bytes == value.nbytes
    with pytest.raises(StorageError, match="its last write failed"):
        nvme.read(WHOLE).result()
    nvme.write(WHOLE, value + 2).result()
    np.testing.assert_array_equal(nvme.read(WHOLE).result(), value + 2)


def test_rows_that_fail_leave_the_others_of_other_files(
    tmp_nvme: Path,
) -> None:
    is_broken = False

    def pwritev(*arguments: Any) -> int:
        if is_broken:
            raise OSError(errno.EIO, "whatever")
        return os.pwritev(*arguments)

    store = NvmeStore([tmp_nvme], system=System(pwritev=pwritev))
    store.create(WHOLE, SPEC, rows_per_chunk=2)
    store.write(WHOLE, VALUE.copy()).result()
    is_broken = True
    with pytest.raises(StorageError):
        store.write(rows(2, 3), -VALUE[2:3]).result()
    is_broken = False
    np.testing.assert_array_equal(store.read(rows(0, 2)).result(), VALUE[:2])
    for array in (WHOLE, rows(2, 3), rows(3, 4)):
        with pytest.raises(StorageError, match="last write"):
            store.read(array).result()
    with pytest.raises(StorageError, match="last write"):
        store.write(rows(3, 4), VALUE[3:4]).result()
    store.write(rows(2, 4), -VALUE[2:4]).result()
    np.testing.assert_array_equal(store.read(rows(1, 4)).result()[1:], -VALUE[2:4])
    store.close()


@pytest.mark.parametrize("checksums", ["full", "sampled"])
def test_a_flipped_bit_is_an_error(tmp_nvme: Path, checksums: Coverage) -> None:
    store = NvmeStore([tmp_nvme], checksums=checksums)
    store.write(WHOLE, VALUE.copy()).result()
    content = bytearray(chunk_file(store, 0).read_bytes())
    content[17] ^= 1
    chunk_file(store, 0).write_bytes(content)
    with pytest.raises(StorageError, match="Cannot read param.*checksum"):
        store.read(WHOLE).result()
    store.close()


def test_without_checksums_nothing_is_compared(tmp_nvme: Path) -> None:
    store = NvmeStore([tmp_nvme], checksums="off")
    store.write(WHOLE, VALUE.copy()).result()
    chunk_file(store, 0).write_bytes((-VALUE).tobytes())
    np.testing.assert_array_equal(store.read(WHOLE).result(), -VALUE)
    store.close()


def test_a_file_in_the_way_of_a_folder_is_an_error(
    nvme: NvmeStore, tmp_nvme: Path
) -> None:
    nvme.write(ArrayId(Role.PARAM, "a"), VALUE).result()
    (tmp_nvme / "arrays" / "000002").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="Cannot create gradient/b.*nothing else"):
        nvme.write(ArrayId(Role.GRADIENT, "b"), VALUE)
    assert nvme.ledger.used_bytes == VALUE.nbytes
    nvme.write(ArrayId(Role.GRADIENT, "b"), VALUE).result()


def test_files_of_freed_arrays_are_used_again_by_the_same_layout(
    filled: NvmeStore,
) -> None:
    folder, node = filled.folder(WHOLE), chunk_file(filled, 0).stat().st_ino
    filled.free(WHOLE)
    filled.create(WHOLE, SPEC, rows_per_chunk=2)
    with pytest.raises(StorageError, match="never"):
        filled.read(rows(0, 2)).result()
    filled.write(WHOLE, -VALUE).result()
    assert filled.folder(WHOLE) == folder
    assert chunk_file(filled, 0).stat().st_ino == node
    np.testing.assert_array_equal(filled.read(WHOLE).result(), -VALUE)


def test_files_without_an_array_hold_no_more_than_was_held_already(
    tmp_nvme: Path,
) -> None:
    store, random, held = NvmeStore([tmp_nvme]), Random(0), []
    for number in range(60):
        if held and random.random() < 0.5:
            store.free(held.pop(random.randrange(len(held))))
        else:
            held.append(ArrayId(Role.VALUE, f"{number}"))
            numel = random.choice([100, 200, 300])
            store.write(held[-1], np.ones(numel, np.float32)).result()
        files = (tmp_nvme / "arrays").glob("*/c.*")
        assert sum(f.stat().st_size for f in files) <= store.ledger.peak_bytes
    store.close()


def test_counters_hold_the_bytes_of_finished_reads_and_writes(
    filled: NvmeStore,
) -> None:
    filled.read(WHOLE).result()
    filled.read(rows(1, 2)).result()
    filled.write(rows(0, 2), VALUE[:2]).result()
    assert filled.read_bytes == SPEC.nbytes + 1 * 4 * 4
    assert filled.written_bytes == SPEC.nbytes + 2 * 4 * 4


def test_an_array_larger_than_a_chunk_is_cut_into_files(nvme: NvmeStore) -> None:
    # Rows of half a chunk, of which a prime number cannot be cut into pairs.
    value = np.zeros((5, MAX_CHUNK_BYTES // 8), np.float32)
    value[:] = np.arange(5)[:, None]
    nvme.write(WHOLE, value.copy()).result()
    files = list(nvme.folder(WHOLE).glob("c.*"))
    assert len(files) == 5
    assert {file.stat().st_size for file in files} == {MAX_CHUNK_BYTES // 2}
    np.testing.assert_array_equal(nvme.read(WHOLE).result(), value)


def test_chunks_are_dealt_over_the_folders(tmp_path: Path) -> None:
    store = NvmeStore(two_folders(tmp_path))
    store.create(WHOLE, SPEC, rows_per_chunk=1)
    store.write(WHOLE, VALUE.copy()).result()
    homes = [p.relative_to(tmp_path).parts[0] for p in store.chunk_files(WHOLE)]
    assert homes.count("a") == homes.count("b") == 3
    np.testing.assert_array_equal(store.read(WHOLE).result(), VALUE)
    np.testing.assert_array_equal(store.read(rows(1, 4)).result(), VALUE[1:4])
    found = zarr.open_array(store.folder(WHOLE), mode="r")
    np.testing.assert_array_equal(np.asarray(found[...]), VALUE)
    store.close()


def test_many_arrays_can_be_under_way_at_once(nvme: NvmeStore) -> None:
    arrays = [ArrayId(Role.PARAM, f"blocks/{i}/w") for i in range(50)]
    values = [np.full((3, 5), i, np.float32) for i in range(50)]
    writes = [nvme.write(*pair) for pair in zip(arrays, values, strict=True)]
    assert all(write.result() is None for write in writes)
    for value, read in zip(values, [nvme.read(array) for array in arrays], strict=True):
        np.testing.assert_array_equal(read.result(), value)


def test_clear_deletes_the_arrays_and_their_folders(
    filled: NvmeStore, tmp_nvme: Path
) -> None:
    filled.write(ArrayId(Role.GRADIENT, "a"), VALUE)
    filled.clear()
    assert filled.ledger.used_bytes == 0
    assert not filled.contains(WHOLE)
    assert os.listdir(tmp_nvme / "arrays") == []
    filled.write(WHOLE, VALUE).result()


def test_close_waits_for_what_is_under_way_and_lets_go_of_the_folder(
    tmp_nvme: Path,
) -> None:
    store = NvmeStore([tmp_nvme])
    pending = [store.write(ArrayId(Role.PARAM, f"{i}"), VALUE) for i in range(20)]
    store.close()
    assert all(write.done() for write in pending)
    assert len(list((tmp_nvme / "arrays").glob("*/c.0.0"))) == 20
    assert threads_of(tmp_nvme) == open_files(tmp_nvme) == []
    store.close()
    NvmeStore([tmp_nvme]).close()


def test_the_folder_of_a_store_is_refused_to_others(
    nvme: NvmeStore, tmp_nvme: Path
) -> None:
    with pytest.raises(StorageError, match="in use by another engine of this process"):
        NvmeStore([tmp_nvme])
    nvme.write(WHOLE, VALUE).result()


def test_all_files_of_arrays_are_private(filled: NvmeStore, tmp_nvme: Path) -> None:
    for path in (tmp_nvme / "arrays").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_small_reads_of_what_is_cached_are_answered_at_once(
    filled: NvmeStore, tmp_nvme: Path
) -> None:
    filled.close()
    kernel = Kernel()
    store = NvmeStore([tmp_nvme], system=kernel.system())
    store.write(WHOLE, VALUE.copy()).result()
    kernel.transfers.clear()
    assert store.read(WHOLE).done()
    assert {t.thread for t in kernel.transfers} == {threading.current_thread().name}
    store.close()


def test_small_reads_of_what_is_not_cached_are_left_to_a_thread(
    tmp_nvme: Path,
) -> None:
    threads = []

    def preadv(*arguments: Any) -> int:
        threads.append(threading.current_thread().name)
        if len(arguments) > 3:
            raise BlockingIOError(errno.EAGAIN, "not in the page cache")
        return os.preadv(*arguments)

    store = NvmeStore([tmp_nvme], system=System(preadv=preadv))
    store.write(WHOLE, VALUE.copy()).result()
    np.testing.assert_array_equal(store.read(WHOLE).result(), VALUE)
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("nvme read")
    assert store.read_bytes == VALUE.nbytes
    store.close()


def test_what_was_read_is_aligned_and_the_callers(nvme: NvmeStore) -> None:
    value = np.zeros((4, 1000), np.float32)
    nvme.write(WHOLE, value).result()
    for array in (WHOLE, rows(1, 3)):
        found = nvme.read(array).result()
        assert found.ctypes.data % 64 == 0
        found[...] = 1
    assert not nvme.read(WHOLE).result().any()


def test_a_drive_that_stalls_fails_the_write_and_the_next_one_works(
    tmp_nvme: Path,
) -> None:
    gate = Gate(os.pwritev)
    store = NvmeStore([tmp_nvme], stall_seconds=0.2, system=System(pwritev=gate))
    store.write(WHOLE, VALUE.copy()).result()
    gate.shut()
    with pytest.raises(StorageError, match="Cannot write param.*not answered") as error:
        store.write(WHOLE, -VALUE).result(SECONDS_TO_WAIT)
    assert error.value.errno == errno.ETIMEDOUT
    with pytest.raises(StorageError):
        store.read(WHOLE).result(SECONDS_TO_WAIT)
    gate.open()
    eventually(lambda: not store._drives[0].is_stalled)
    store.write(WHOLE, VALUE + 5).result(SECONDS_TO_WAIT)
    np.testing.assert_array_equal(store.read(WHOLE).result(), VALUE + 5)
    store.close()


def test_one_bad_folder_leaves_the_others_unlocked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        NvmeStore([tmp_path / "good", tmp_path / "file"])
    NvmeStore([tmp_path / "good"]).close()


def test_check_space_asks_for_the_folders_of_the_store(nvme: NvmeStore) -> None:
    nvme.check_space(1)
    with pytest.raises(StorageError, match="free"):
        nvme.check_space(2**60)
