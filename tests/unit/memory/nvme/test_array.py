"""What is on the drive: zarr arrays that others can read and write."""

import json
import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr

from zinf.memory import StorageError
from zinf.memory.aligned import aligned_empty
from zinf.memory.chunk import chunk_shape
from zinf.memory.nvme import Drive
from zinf.memory.nvme.array import (
    Layout,
    NvmeArray,
    Rows,
    layout_of,
    write_metadata,
)
from zinf.memory.nvme.checksum import Coverage
from zinf.memory.nvme.chunk_file import ChunkFile
from zinf.memory.nvme.file import as_bytes
from zinf.memory.nvme.open_file import DIRECT_FROM_BYTES, Mover
from zinf.memory.nvme.request import Task
from zinf.memory.zarr_format import as_stored, zarr_spec
from zinf.program import ArraySpec

CONTEXT = ts.Context({"file_io_sync": False})


def spec_of(value: np.ndarray) -> ArraySpec:
    return ArraySpec(value.shape, value.dtype.name, value.dtype.itemsize)


@pytest.fixture
def mover(tmp_nvme: Path) -> Mover:
    return Drive(tmp_nvme).mover()


Make = Callable[..., NvmeArray]
Fill = Callable[..., NvmeArray]


@pytest.fixture
def make(mover: Mover) -> Make:
    """Makes an array, of which nothing was written yet."""

    def make(
        folder: Path,
        spec: ArraySpec,
        rows_per_chunk: int | None = None,
        coverage: Coverage = "full",
    ) -> NvmeArray:
        layout = layout_of(spec, rows_per_chunk)
        write_metadata(folder, layout, CONTEXT, timeout_seconds=20)
        chunks = [
            ChunkFile(
                folder / name,
                start=start,
                nbytes=nbytes,
                file_bytes=layout.chunk_bytes,
                coverage=coverage,
            )
            for name, start, nbytes in layout.runs()
        ]
        for chunk in chunks:
            chunk.allocate(mover)
        return NvmeArray(folder, layout, chunks)

    return make


@pytest.fixture
def fill(make: Make, mover: Mover) -> Fill:
    """Makes an array with content."""

    def fill(folder: Path, value: np.ndarray, *options: Any) -> NvmeArray:
        array = make(folder, spec_of(value), *options)
        write(array, mover, value)
        return array

    return fill


def write(
    array: NvmeArray, mover: Mover, value: np.ndarray, rows: Rows | None = None
) -> None:
    run(array.writes(rows, as_bytes(np.ascontiguousarray(value))), mover)


def read(array: NvmeArray, mover: Mover, rows: Rows | None = None) -> np.ndarray:
    value = aligned_empty(array.shape_of(rows), array.dtype)
    run(array.reads(rows, as_bytes(value)), mover)
    return value


def run(tasks: Sequence[tuple[ChunkFile, Task]], mover: Mover) -> None:
    for _, task in tasks:
        task(mover)


def tensorstore(array: NvmeArray) -> ts.TensorStore:
    spec = zarr_spec(array.folder, array.spec, array.layout.chunk)
    return ts.open(spec, context=CONTEXT, open=True).result()


def counted(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (np.arange(prod(shape)) % 251).reshape(shape).astype(dtype)


SHAPES = [(), (5, 3, 2), (0, 2), (9,), (3, DIRECT_FROM_BYTES // 4)]
DTYPES = ["float32", "bool", "complex64", "uint8", "float16"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_zarr_package_reads_what_was_written(
    tmp_nvme: Path, fill: Fill, shape: tuple[int, ...]
) -> None:
    for dtype in DTYPES:
        value = counted(shape, dtype)
        array = fill(tmp_nvme / dtype, value, 2)
        found = zarr.open_array(array.folder, mode="r")
        assert found.shape == value.shape
        np.testing.assert_array_equal(np.asarray(found[...]), value, strict=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensorstore_reads_what_was_written(
    tmp_nvme: Path, fill: Fill, shape: tuple[int, ...]
) -> None:
    for dtype in (*DTYPES, "bfloat16"):
        value = counted(shape, dtype)
        array = fill(tmp_nvme / dtype, value, 2)
        found = tensorstore(array).read().result()
        np.testing.assert_array_equal(found, as_stored(value), strict=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_tensorstore_wrote_is_read(
    tmp_nvme: Path, make: Make, mover: Mover, shape: tuple[int, ...]
) -> None:
    """Through the chunk files; checksums are of what was written here."""
    for dtype in (*DTYPES, "bfloat16"):
        value = counted(shape, dtype)
        array = make(tmp_nvme / dtype, spec_of(value), 2)
        tensorstore(array).write(as_stored(value)).result()
        np.testing.assert_array_equal(read(array, mover), value, strict=True)
        if shape and shape[0] > 2:
            np.testing.assert_array_equal(read(array, mover, (1, 3)), value[1:3])


def test_what_tensorstore_wrote_over_checked_content_is_an_error(
    tmp_nvme: Path, fill: Fill, mover: Mover
) -> None:
    array = fill(tmp_nvme / "w", np.zeros((4, 2), np.float32))
    tensorstore(array).write(np.ones((4, 2), np.float32)).result()
    with pytest.raises(StorageError, match="not what was written"):
        read(array, mover)


def test_any_reader_gets_the_bits_of_bfloat16(
    tmp_nvme: Path, fill: Fill, mover: Mover
) -> None:
    value = counted((6, 2), ml_dtypes.bfloat16)
    array = fill(tmp_nvme / "w", value, 2)
    np.testing.assert_array_equal(read(array, mover), value, strict=True)
    found = zarr.open_array(tmp_nvme / "w", mode="r")
    assert found.attrs["dtype"] == "bfloat16"
    bits = np.asarray(found[...])
    np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16), value, strict=True)


def test_a_chunk_file_is_the_bytes_of_the_chunk(tmp_nvme: Path, fill: Fill) -> None:
    value = counted((6, 4), np.float32)
    fill(tmp_nvme / "w", value, 2)
    for index in range(3):
        chunk = (tmp_nvme / "w" / f"c.{index}.0").read_bytes()
        assert chunk == value[2 * index : 2 * index + 2].astype("<f4").tobytes()
    codecs = json.loads((tmp_nvme / "w" / "zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes"]


def test_the_last_chunk_is_padded_with_zeros(tmp_nvme: Path, fill: Fill) -> None:
    value = counted((5, 4), np.float32)
    array = fill(tmp_nvme / "w", value, 3)
    last = (tmp_nvme / "w" / "c.1.0").read_bytes()
    assert last == value[3:].tobytes() + bytes(16)
    assert [chunk.nbytes for chunk in array.chunks] == [48, 32]


def test_a_scalar_is_one_file_and_what_is_empty_is_none(
    tmp_nvme: Path, fill: Fill
) -> None:
    fill(tmp_nvme / "scalar", np.float32(3).reshape(()))
    assert set(os.listdir(tmp_nvme / "scalar")) == {"zarr.json", "c"}
    fill(tmp_nvme / "empty", np.zeros((3, 0, 2)))
    assert os.listdir(tmp_nvme / "empty") == ["zarr.json"]


def test_only_this_user_can_read_an_array(tmp_nvme: Path, fill: Fill) -> None:
    fill(tmp_nvme / "w", counted((6, 4), np.float32), 2)
    assert (tmp_nvme / "w").stat().st_mode & 0o777 == 0o700
    for path in (tmp_nvme / "w").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("rows", "touched"),
    [((2, 4), {"c.1.0"}), ((3, 4), {"c.1.0"}), ((1, 5), {"c.0.0", "c.1.0", "c.2.0"})],
)
def test_rows_touch_only_the_files_that_have_them(
    tmp_nvme: Path, fill: Fill, mover: Mover, rows: Rows, touched: set[str]
) -> None:
    array = fill(tmp_nvme / "w", np.zeros((6, 4), np.float32), 2)
    names = [chunk.path.name for chunk in array.chunks]
    for name in names:
        os.utime(tmp_nvme / "w" / name, ns=(0, 0))
    before = {name: os.stat(tmp_nvme / "w" / name).st_ino for name in names}
    write(array, mover, np.ones((rows[1] - rows[0], 4), np.float32), rows)
    after = {name: os.stat(tmp_nvme / "w" / name) for name in names}
    assert {name for name in names if after[name].st_mtime_ns} == touched
    assert before == {name: stat.st_ino for name, stat in after.items()}


def test_a_hard_link_keeps_the_old_content(
    tmp_nvme: Path, fill: Fill, mover: Mover
) -> None:
    """So a checkpoint can be links to the files of the moment."""
    array = fill(tmp_nvme / "w", np.zeros(4, np.float32))
    os.link(tmp_nvme / "w" / "c.0", tmp_nvme / "saved")
    write(array, mover, np.ones(4, np.float32))
    assert not np.fromfile(tmp_nvme / "saved", np.float32).any()
    assert read(array, mover).all()


def test_writing_leaves_no_other_files(
    tmp_nvme: Path, fill: Fill, mover: Mover
) -> None:
    array = fill(tmp_nvme / "w", np.zeros((4, 2), np.float32), 2)
    os.link(tmp_nvme / "w" / "c.0.0", tmp_nvme / "saved")
    write(array, mover, np.ones((2, 2), np.float32), (1, 3))
    assert set(os.listdir(tmp_nvme / "w")) == {"zarr.json", "c.0.0", "c.1.0"}


@pytest.mark.parametrize("rows", [(0, 1), (1, 2), (1, 4), (2, 3), (3, 5), (0, 5)])
def test_unaligned_rows_keep_the_other_rows(
    tmp_nvme: Path, fill: Fill, mover: Mover, rows: Rows
) -> None:
    value = counted((5, 2), np.float32)
    array = fill(tmp_nvme / "w", value, 3)
    np.testing.assert_array_equal(read(array, mover, rows), value[slice(*rows)])
    write(array, mover, -value[slice(*rows)], rows)
    value[slice(*rows)] *= -1
    np.testing.assert_array_equal(read(array, mover), value)


@pytest.mark.parametrize("rows", [(0, 1), (2, 3), (2, 5)])
def test_unaligned_rows_of_a_lost_chunk_fail_instead_of_zeroing_the_others(
    tmp_nvme: Path, fill: Fill, mover: Mover, rows: Rows
) -> None:
    array = fill(tmp_nvme / "w", np.ones((6, 2), np.float32), 3)
    os.remove(tmp_nvme / "w" / "c.0.0")
    with pytest.raises(StorageError, match="No such file"):
        write(array, mover, np.zeros((rows[1] - rows[0], 2), np.float32), rows)
    assert not (tmp_nvme / "w" / "c.0.0").exists()


def test_rows_count_as_written_one_by_one(tmp_nvme: Path, make: Make) -> None:
    array = make(tmp_nvme / "w", ArraySpec((4, 2), "float32", 4), 2)
    array.mark_written((1, 3))
    assert array.is_written((1, 3)) and array.is_written((2, 3))
    assert not array.is_written((0, 2)) and not array.is_written(None)
    array.mark_written(None)
    assert array.is_written(None)
    array.mark_written((2, 3), is_written=False)
    assert array.is_written((0, 2)) and not array.is_written((2, 4))


def test_a_forgotten_array_was_never_written(
    tmp_nvme: Path, fill: Fill, mover: Mover
) -> None:
    array = fill(tmp_nvme / "w", counted((6, 4), np.float32), 2)
    array.mark_written(None)
    array.forget()
    assert not array.is_written((0, 1)) and not array.is_written(None)
    (tmp_nvme / "w" / "c.0.0").write_bytes(bytes(32))
    write(array, mover, np.ones((1, 4), np.float32), (1, 2))
    assert read(array, mover, (1, 2)).all()


@pytest.mark.parametrize(
    "shape", [(), (3,), (5, 3, 2), (2, 7, 3), (2, 3, 4, 5), (9, 1)]
)
@pytest.mark.parametrize("max_bytes", [1, 8, 40, 96])
@pytest.mark.parametrize("rows_per_chunk", [None, 1, 2])
def test_chunks_are_runs_of_the_memory_without_gaps(
    shape: tuple[int, ...], max_bytes: int, rows_per_chunk: int | None
) -> None:
    spec = ArraySpec(shape, "float32", 4)
    layout = Layout(
        spec, chunk_shape(spec, rows_per_chunk=rows_per_chunk, max_bytes=max_bytes)
    )
    end, names = 0, set()
    for name, start, nbytes in layout.runs():
        assert start == end and 0 < nbytes <= layout.chunk_bytes
        end += nbytes
        names.add(name)
    assert end == spec.nbytes
    grid = [-(-dim // size) for dim, size in zip(shape, layout.chunk, strict=True)]
    assert len(names) == prod(grid)


def test_metadata_that_cannot_be_written_is_an_error(tmp_nvme: Path) -> None:
    layout = layout_of(ArraySpec((4,), "uint4", 1))
    with pytest.raises(ValueError, match="uint4"):
        write_metadata(tmp_nvme / "w", layout, CONTEXT, timeout_seconds=20)
    layout = layout_of(ArraySpec((4,), "uint8", 1))
    with pytest.raises(FileNotFoundError):
        write_metadata(tmp_nvme / "no" / "w", layout, CONTEXT, timeout_seconds=20)
