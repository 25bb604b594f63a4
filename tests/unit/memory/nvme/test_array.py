"""What is on the drive: zarr arrays that others can read and write."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr

from zinf.memory import NvmeStore, StorageError
from zinf.memory.chunk import LARGEST_PADDING, MAX_CHUNK_BYTES, chunk_shape
from zinf.memory.nvme.array import Layout, NvmeArray, Rows, layout_of, write_metadata
from zinf.memory.nvme.open_file import DIRECT_FROM_BYTES
from zinf.memory.zarr_format import as_stored, zarr_spec
from zinf.program import ArrayId, ArraySpec, Role

CONTEXT = ts.Context({"file_io_sync": False})
W = ArrayId(Role.PARAM, "w")
SHAPES = [(), (5, 3, 2), (0, 2), (9,), (3, DIRECT_FROM_BYTES // 4)]
DTYPES = ["float32", "bool", "complex64", "uint8", "float16", "bfloat16"]


def counted(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return (np.arange(prod(shape)) % 251).reshape(shape).astype(kind)


def fill(
    store: NvmeStore, value: np.ndarray, rows_per_chunk: int | None = None
) -> Path:
    """Write `value` as W; returns its folder."""
    spec = ArraySpec(value.shape, value.dtype.name, value.dtype.itemsize)
    store.create(W, spec, rows_per_chunk)
    store.write(W, value.copy()).result()
    return store.folder(W)


def tensorstore(store: NvmeStore) -> ts.TensorStore:
    layout = store.layout(W)
    spec = zarr_spec(store.folder(W), layout.spec, layout.chunk)
    return ts.open(spec, context=CONTEXT, open=True).result()


@pytest.fixture
def unchecked(tmp_nvme: Path) -> Iterator[NvmeStore]:
    store = NvmeStore([tmp_nvme], checksums="off")
    yield store
    store.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_readers_read_and_write_the_files(
    unchecked: NvmeStore, shape: tuple[int, ...]
) -> None:
    for dtype in DTYPES:
        value = counted(shape, dtype)
        folder = fill(unchecked, value, 2)
        found = zarr.open_array(folder, mode="r")
        stored = np.asarray(found[...])
        if dtype == "bfloat16":
            assert found.attrs["dtype"] == "bfloat16"
            stored = stored.view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(stored, value, strict=True)
        other = tensorstore(unchecked)
        np.testing.assert_array_equal(
            other.read().result(), as_stored(value), strict=True
        )
        other.write(as_stored(value[::-1] if shape else value)).result()
        expected = value[::-1] if shape else value
        read = unchecked.read(W).result()
        np.testing.assert_array_equal(read, expected, strict=True)
        unchecked.free(W)


def test_what_others_wrote_over_checked_content_is_an_error(nvme: NvmeStore) -> None:
    fill(nvme, np.zeros((4, 2), np.float32))
    tensorstore(nvme).write(np.ones((4, 2), np.float32)).result()
    with pytest.raises(StorageError, match="not what was written"):
        nvme.read(W).result()


def test_a_chunk_file_is_the_bytes_of_the_chunk_and_padding_of_zeros(
    nvme: NvmeStore,
) -> None:
    value = counted((5, 4))
    folder = fill(nvme, value, 3)
    assert (folder / "c.0.0").read_bytes() == value[:3].astype("<f4").tobytes()
    assert (folder / "c.1.0").read_bytes() == value[3:].tobytes() + bytes(16)
    codecs = json.loads((folder / "zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes"]
    for path in (folder, *folder.iterdir()):
        mode = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 == mode
    nvme.free(W)
    folder = fill(nvme, np.array(3, np.float32))
    assert set(os.listdir(folder)) == {"zarr.json", "c"}
    nvme.free(W)
    assert os.listdir(fill(nvme, np.zeros((3, 0, 2)))) == ["zarr.json"]


@pytest.mark.parametrize(
    ("rows", "touched"),
    [
        ((0, 1), {"c.0.0"}),
        ((2, 4), {"c.1.0"}),
        ((3, 4), {"c.1.0"}),
        ((1, 5), {"c.0.0", "c.1.0", "c.2.0"}),
    ],
)
def test_rows_touch_only_the_files_that_hold_them(
    nvme: NvmeStore, rows: Rows, touched: set[str]
) -> None:
    value = counted((6, 4))
    fill(nvme, value, 2)
    files = nvme.chunk_files(W)
    for file in files:
        os.utime(file, ns=(0, 0))
    nodes = [file.stat().st_ino for file in files]
    part = replace(W, rows=rows)
    assert {name for name, _ in nvme.chunks(part)} == touched
    np.testing.assert_array_equal(nvme.read(part).result(), value[slice(*rows)])
    nvme.write(part, -value[slice(*rows)]).result()
    assert {file.name for file in files if file.stat().st_mtime_ns} == touched
    assert [file.stat().st_ino for file in files] == nodes
    value[slice(*rows)] *= -1
    np.testing.assert_array_equal(nvme.read(W).result(), value)


def test_rows_count_as_written_one_by_one(tmp_nvme: Path) -> None:
    layout = layout_of(ArraySpec((4, 2), "float32", 4), 2)
    array = NvmeArray(tmp_nvme, layout, [])
    array.mark_written((1, 3))
    assert array.is_written((1, 3)) and array.is_written((2, 3))
    assert not array.is_written((0, 2)) and not array.is_written(None)
    array.mark_written(None)
    assert array.is_written(None)
    array.mark_written((2, 3), is_written=False)
    assert array.is_written((0, 2)) and not array.is_written((2, 4))
    array.forget()
    assert not array.is_written((0, 1))


@pytest.mark.parametrize(
    "shape", [(), (3,), (5, 3, 2), (2, 7, 3), (2, 3, 4, 5), (9, 1)]
)
@pytest.mark.parametrize("rows_per_chunk", [None, 2])
def test_chunks_are_runs_of_the_memory_without_gaps(
    shape: tuple[int, ...], rows_per_chunk: int | None
) -> None:
    spec = ArraySpec(shape, "float32", 4)
    for max_bytes in (1, 8, 40, 96):
        chunk = chunk_shape(spec, rows_per_chunk=rows_per_chunk, max_bytes=max_bytes)
        layout = Layout(spec, chunk)
        end, names = 0, set()
        for name, start, nbytes in layout.runs():
            assert start == end and 0 < nbytes <= layout.chunk_bytes
            end += nbytes
            names.add(name)
        assert end == spec.nbytes
        grid = [-(-dim // size) for dim, size in zip(shape, chunk, strict=True)]
        assert len(names) == prod(grid)


def test_no_chunk_is_over_the_limit() -> None:
    layout = layout_of(ArraySpec((10007, 2_000_000), "float32", 4))
    assert layout.chunk_bytes <= MAX_CHUNK_BYTES * (1 + LARGEST_PADDING)


@pytest.mark.parametrize(
    ("dtype", "folder", "error", "message"),
    [("uint4", "w", ValueError, "uint4"), ("uint8", "no/w", FileNotFoundError, "no")],
)
def test_metadata_that_cannot_be_written_is_an_error(
    tmp_nvme: Path, dtype: str, folder: str, error: Any, message: str
) -> None:
    layout = layout_of(ArraySpec((4,), dtype, 1))
    with pytest.raises(error, match=message):
        write_metadata(tmp_nvme / folder, layout, CONTEXT, timeout_seconds=20)
