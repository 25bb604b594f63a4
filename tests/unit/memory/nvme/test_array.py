"""What is on the drive: zarr arrays that others can read and write."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr

from zinf.core.memory import NvmeStore
from zinf.core.memory.nvme.open_file import DIRECT_FROM_BYTES
from zinf.core.memory.zarr_format import as_stored, zarr_spec
from zinf.core.program import ArrayId, ArraySpec, Role

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


@pytest.fixture
def unchecked(tmp_nvme: Path) -> Iterator[NvmeStore]:
    store = NvmeStore([tmp_nvme], checksums="off")
    yield store
    store.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_readers_read_and_write_the_files(unchecked, shape):
    for dtype in DTYPES:
        value = counted(shape, dtype)
        folder = fill(unchecked, value, 2)
        found = zarr.open_array(folder, mode="r")
        stored = np.asarray(found[...])
        if dtype == "bfloat16":
            assert found.attrs["dtype"] == "bfloat16"
            stored = stored.view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(stored, value, strict=True)
        layout = unchecked.layout(W)
        spec = zarr_spec(folder, layout.spec, layout.chunk)
        other = ts.open(spec, open=True).result()
        stored = other.read().result()
        np.testing.assert_array_equal(stored, as_stored(value), strict=True)
        expected = value[::-1] if shape else value
        other.write(as_stored(expected)).result()
        read = unchecked.read(W).result()
        np.testing.assert_array_equal(read, expected, strict=True)
        unchecked.free(W)


def test_a_chunk_file_is_the_bytes_of_the_chunk_and_padding_of_zeros(nvme):
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


def test_rows_touch_only_the_files_that_hold_them(nvme):
    value = counted((6, 4))
    fill(nvme, value, 2)
    files = nvme.chunk_files(W)
    nodes = [file.stat().st_ino for file in files]
    for rows, touched in (
        ((0, 1), {"c.0.0"}),
        ((2, 4), {"c.1.0"}),
        ((3, 4), {"c.1.0"}),
        ((1, 5), {"c.0.0", "c.1.0", "c.2.0"}),
    ):
        for file in files:
            os.utime(file, ns=(0, 0))
        part = replace(W, rows=rows)
        assert {name for name, _ in nvme.chunks(part)} == touched
        np.testing.assert_array_equal(nvme.read(part).result(), value[slice(*rows)])
        value[slice(*rows)] *= -1
        nvme.write(part, value[slice(*rows)].copy()).result()
        assert {file.name for file in files if file.stat().st_mtime_ns} == touched
        assert [file.stat().st_ino for file in files] == nodes
        np.testing.assert_array_equal(nvme.read(W).result(), value)
