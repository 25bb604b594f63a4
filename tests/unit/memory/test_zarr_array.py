"""What is on the drive: zarr arrays that others can read, whole or not at all."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr

from zinf.memory.zarr_array import ZarrArray, storage_context
from zinf.program import ArraySpec


def make(
    folder: Path, value: np.ndarray, rows_per_chunk: int | None = None
) -> ZarrArray:
    spec = ArraySpec(value.shape, value.dtype.name, value.dtype.itemsize)
    array = ZarrArray(
        folder, spec, rows_per_chunk=rows_per_chunk, context=storage_context()
    )
    array.write(None, value).result()
    array.mark_written(None)
    return array


def read(array: ZarrArray, rows: tuple[int, int] | None = None) -> np.ndarray:
    value, done = array.read(rows)
    done.result()
    return value


@pytest.mark.parametrize("shape", [(), (6, 4), (5, 3, 2), (0, 2)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "complex64", "uint8"])
def test_the_zarr_package_reads_the_folder(tmp_nvme: Path, shape, dtype) -> None:
    value = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    make(tmp_nvme / "w", value, rows_per_chunk=2)
    found = zarr.open_array(tmp_nvme / "w", mode="r")
    assert found.shape == value.shape
    np.testing.assert_array_equal(np.asarray(found[...]), value, strict=True)


def test_any_reader_gets_the_bits_of_bfloat16(tmp_nvme: Path) -> None:
    value = np.arange(12).reshape(6, 2).astype(ml_dtypes.bfloat16)
    array = make(tmp_nvme / "w", value, rows_per_chunk=2)
    np.testing.assert_array_equal(read(array), value, strict=True)
    found = zarr.open_array(tmp_nvme / "w", mode="r")
    assert found.attrs["dtype"] == "bfloat16"
    bits = np.asarray(found[...])
    np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16), value, strict=True)


def test_a_chunk_file_is_the_bytes_of_the_chunk(tmp_nvme: Path) -> None:
    value = np.arange(24, dtype=np.float32).reshape(6, 4)
    make(tmp_nvme, value, rows_per_chunk=2)
    for index in range(3):
        chunk = (tmp_nvme / f"c.{index}.0").read_bytes()
        assert chunk == value[2 * index : 2 * index + 2].astype("<f4").tobytes()
    codecs = json.loads((tmp_nvme / "zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes"]


def test_aligned_rows_touch_only_their_own_files(tmp_nvme: Path) -> None:
    value = np.zeros((6, 4), np.float32)
    array = make(tmp_nvme, value, rows_per_chunk=2)
    before = {name: os.stat(tmp_nvme / name).st_ino for name in os.listdir(tmp_nvme)}
    array.write((2, 4), value[2:4]).result()
    after = {name: os.stat(tmp_nvme / name).st_ino for name in os.listdir(tmp_nvme)}
    assert {name for name in before if before[name] != after[name]} == {"c.1.0"}


def test_a_hard_link_keeps_the_old_content(tmp_nvme: Path) -> None:
    """So a checkpoint can be links to the files of the moment."""
    array = make(tmp_nvme / "w", np.zeros(4, np.float32))
    os.link(tmp_nvme / "w" / "c.0", tmp_nvme / "saved")
    array.write(None, np.ones(4, np.float32)).result()
    assert not np.fromfile(tmp_nvme / "saved", np.float32).any()
    assert read(array).all()


def test_writing_leaves_no_other_files(tmp_nvme: Path) -> None:
    array = make(tmp_nvme, np.zeros((4, 2), np.float32), rows_per_chunk=2)
    array.write((1, 3), np.ones((2, 2), np.float32)).result()
    assert set(os.listdir(tmp_nvme)) == {"zarr.json", "c.0.0", "c.1.0"}


def test_what_was_read_is_aligned_and_the_callers(tmp_nvme: Path) -> None:
    array = make(tmp_nvme, np.zeros((4, 1000), np.float32))
    for rows in (None, (1, 3)):
        value = read(array, rows)
        assert value.ctypes.data % 64 == 0
        value[...] = 1
    assert not read(array).any()


def test_rows_count_as_written_one_by_one(tmp_nvme: Path) -> None:
    spec = ArraySpec((4, 2), "float32", 4)
    array = ZarrArray(tmp_nvme, spec, rows_per_chunk=2, context=storage_context())
    array.mark_written((1, 3))
    assert array.is_written((1, 3)) and array.is_written((2, 3))
    assert not array.is_written((0, 2)) and not array.is_written(None)


@pytest.mark.parametrize("rows", [(0, 1), (1, 2), (1, 4), (2, 3), (3, 5)])
def test_unaligned_rows_keep_the_other_rows(tmp_nvme: Path, rows) -> None:
    value = np.arange(10, dtype=np.float32).reshape(5, 2)
    array = make(tmp_nvme, value, rows_per_chunk=3)
    array.write(rows, -value[slice(*rows)]).result()
    value[slice(*rows)] *= -1
    np.testing.assert_array_equal(read(array), value)


@pytest.mark.parametrize("rows", [(0, 1), (2, 3), (2, 5)])
def test_unaligned_rows_of_a_lost_chunk_fail_instead_of_zeroing_the_others(
    tmp_nvme: Path, rows
) -> None:
    array = make(tmp_nvme, np.ones((6, 2), np.float32), rows_per_chunk=3)
    os.remove(tmp_nvme / "c.0.0")
    with pytest.raises(ValueError, match="NOT_FOUND"):
        array.write(rows, np.zeros((rows[1] - rows[0], 2), np.float32)).result()


def test_deleting_leaves_arrays_deeper_in_alone(tmp_nvme: Path) -> None:
    outer = make(tmp_nvme / "a", np.zeros((4, 2), np.float32), rows_per_chunk=1)
    inner = make(tmp_nvme / "a" / "b", np.ones(3, np.float32))
    outer.delete()
    assert os.listdir(tmp_nvme / "a") == ["b"]
    assert read(inner).all()
