"""A checkpoint that somebody made up is refused, and nothing outside it is touched."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from zinf.checkpoint import read_arrays, write_arrays
from zinf.checkpoint.manifest import FILE, checksum_of
from zinf.checkpoint.saved import Saved
from zinf.core.interchange import export_orbax, export_safetensors
from zinf.core.memory import Residents, StorageError, open_stores
from zinf.core.program import ArrayId, ArraySpec, Role, Tier
from zinf.core.sharding import layouts_on_one

KERNEL = ArrayId(Role.PARAM, "dense/kernel")
CONTENT = np.arange(12, dtype=np.float32).reshape(4, 3)
REFUSED = (ValueError, StorageError, FileNotFoundError)


def residents_of(array: ArrayId = KERNEL, content: np.ndarray = CONTENT) -> Residents:
    spec = ArraySpec(content.shape, content.dtype.name, content.dtype.itemsize)
    stores = open_stores(jax.devices()[0])
    layouts = layouts_on_one(jax.devices()[0], {array: spec})
    residents = Residents(stores, layouts, {array: Tier.HOST})
    residents.write(array, content.copy())
    return residents


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_arrays(tmp_path / "saved", residents_of(), {"num_steps": 1})
    return tmp_path / "saved"


def craft(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest as somebody would who knows how checksums are made."""
    path = folder / FILE
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    content["checksum"] = checksum_of(content)
    path.write_text(json.dumps(content))


def first(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["arrays"][0].update(changes)


def load(folder: Path) -> dict[ArrayId, np.ndarray]:
    with Saved(folder) as opened:
        return {array: opened.read(array) for array in opened.arrays}


def damages(folder: Path) -> list[str]:
    with Saved(folder) as opened:
        return [f"{damage.file}: {damage.found}" for damage in opened.verify()]


ABSURD = {
    "a shape of exabytes": {"shape": [2**58]},
    "a shape of chunks without end": {"shape": [2**40, 2**10], "chunk": [1, 1]},
    "a size that is negative": {"shape": [-4, 3]},
    "a size that is a bool": {"shape": [True, 3]},
    "a hundred dims": {"shape": [1] * 100, "chunk": [1] * 100},
    "a chunk of nothing": {"chunk": [0, 3]},
    "a chunk of exabytes": {"chunk": [2**58, 3]},
    "a chunk of too few dims": {"chunk": [12]},
    "a dtype of objects": {"dtype": "object"},
    "a dtype of strings of any length": {"dtype": "S1000000000"},
    "a dtype that is a list": {"dtype": [["a", "f4"]]},
    "too many checksums": {"checksums": ["0" * 16] * 2},
    "a checksum that is a number": {"checksums": [3]},
    "a path that is no text": {"path": "\ud800"},
}


@pytest.mark.parametrize("change", ABSURD.values(), ids=ABSURD)
def test_what_no_array_can_be_is_refused(change, saved):
    craft(saved, first(**change))
    with pytest.raises(StorageError, match="Cannot read the manifest") as refused:
        load(saved)
    assert refused.value.filename == str(saved / FILE)


@pytest.mark.parametrize(
    "content",
    ["[]", "3", "{}", '{"format_version": 2}', "[" * 100_000, "\0", ""],
)
def test_a_manifest_that_is_none_is_refused(content, saved):
    (saved / FILE).write_text(content)
    with pytest.raises(REFUSED):
        load(saved)


@pytest.mark.parametrize("keys", [("arrays",), ("scalars",), ("arrays", 0)])
@pytest.mark.parametrize("value", [None, "text", [3], {"a": 3}])
def test_a_part_of_a_manifest_that_is_something_else_is_refused(keys, value, saved):
    def change(content: dict[str, Any]) -> None:
        inside: Any = content
        for key in keys[:-1]:
            inside = inside[key]
        inside[keys[-1]] = value

    craft(saved, change)
    if keys == ("scalars",) and isinstance(value, dict):
        assert load(saved)
        return
    with pytest.raises(REFUSED):
        load(saved)


def test_a_prefix_of_a_manifest_is_refused(saved):
    whole = (saved / FILE).read_bytes()
    for length in range(0, len(whole), 7):
        (saved / FILE).write_bytes(whole[:length])
        with pytest.raises(StorageError, match="Cannot read the manifest"):
            Saved(saved)


@pytest.mark.parametrize("version", [3, 1, "2", None])
def test_other_formats_are_refused(version, saved):
    craft(saved, lambda content: content.update(format_version=version))
    with pytest.raises(REFUSED):
        load(saved)


@pytest.mark.parametrize(
    "path", ["../../../outside", "/etc/passwd", "a\0b", "x" * 5000, "./" * 3000]
)
def test_no_path_leads_out_of_the_folder(path, saved, tmp_path):
    shutil.copytree(saved / "param" / "dense" / "kernel", tmp_path / "outside")
    craft(saved, first(path=path))
    with pytest.raises(StorageError) as refused:
        load(saved)
    assert str(refused.value.filename).startswith(f"{saved}{os.sep}")
    assert all(line.startswith(f"{saved}{os.sep}") for line in damages(saved))
    assert damages(saved)


@pytest.mark.parametrize("role", ["..", "/", "", "../param"])
def test_a_role_that_there_is_not_names_no_folder(role, saved):
    craft(saved, first(role=role, path="outside"))
    with pytest.raises(StorageError, match="is no kind of array that persists"):
        load(saved)
    with pytest.raises(StorageError, match="is no kind of array that persists"):
        damages(saved)


@pytest.mark.parametrize("shape", [[0, 2**59], [2**59, 0]])
def test_an_absurd_number_of_nothing_is_nothing(shape, saved, tmp_path):
    chunk = {"chunk": [1, 1], "checksums": []}
    craft(saved, first(shape=shape, **chunk))
    # The array is empty, but not the one that `zarr.json` describes.
    with pytest.raises(StorageError, match="other things of the array"):
        load(saved)
    assert len(damages(saved)) == 1


def test_a_description_that_disagrees_with_the_manifest_is_refused(saved):
    for change in ({"dtype": "int32"}, {"shape": [3, 4], "chunk": [3, 4]}):
        craft(saved, first(**change))
        with pytest.raises(StorageError, match="other things of the array") as refused:
            load(saved)
        assert refused.value.filename.endswith("dense/kernel/zarr.json")
        assert len(damages(saved)) == 1


def test_a_description_that_was_changed_is_refused(saved):
    path = saved / "param" / "dense" / "kernel" / "zarr.json"
    path.write_text(path.read_text().replace('"float32"', '"float64"'))
    with pytest.raises(StorageError, match="checksum"):
        load(saved)


def test_links_out_of_the_folder_are_refused(saved, tmp_path):
    array = saved / "param" / "dense" / "kernel"
    for path in (array, array.parent, array.parent.parent, saved / FILE):
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
        with pytest.raises(StorageError, match="a link"):
            load(saved)
        path.unlink()
        (tmp_path / "moved").rename(path)


def make_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(file.parent)  # A path of a socket is short.
        bound.bind(file.name)


def test_no_link_is_followed_and_no_pipe_waited_for(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    array = saved / "param" / "dense" / "kernel"
    for file in (array / "c.0.0", array / "zarr.json"):
        file.rename(tmp_path / "moved")
        for make in (
            lambda f: f.symlink_to(tmp_path / "moved"),
            os.mkfifo,
            os.mkdir,
            make_socket,
        ):
            make(file)
            with pytest.raises(StorageError, match="a link, or no file"):
                load(saved)
            assert len(damages(saved)) == 1
            file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        (tmp_path / "moved").rename(file)
    np.testing.assert_array_equal(load(saved)[KERNEL], CONTENT)


@pytest.mark.parametrize("to", [export_safetensors, export_orbax])
def test_a_hostile_checkpoint_is_not_exported(to, saved, tmp_path):
    craft(saved, first(path="../../outside"))
    with Saved(saved) as opened, pytest.raises(REFUSED):
        to(opened, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@pytest.mark.parametrize("to", [export_safetensors, export_orbax])
def test_an_array_larger_than_the_drive_is_not_exported(to, saved, tmp_path):
    # 128 TiB in chunks of 1 GiB, which is the largest chunk that a manifest may name.
    num_chunks, chunk = 2**17, [1, 2**28]
    checksums = ["0" * 16] * num_chunks
    craft(saved, first(shape=[num_chunks, 2**28], chunk=chunk, checksums=checksums))
    with Saved(saved) as opened, pytest.raises(StorageError, match="are free"):
        to(opened, tmp_path / "out")


def test_a_run_that_resumes_keeps_what_it_has(saved):
    residents = residents_of(content=CONTENT + 1)
    craft(saved, first(shape=[3, 4], chunk=[3, 4]))
    with pytest.raises(ValueError, match="is of another run"):
        read_arrays(saved, residents)
    np.testing.assert_array_equal(residents.read(KERNEL), CONTENT + 1)


def test_names_that_a_file_may_not_have_are_safe_in_exports(saved, tmp_path):
    """Names of tensors are text in a header: none becomes a path."""
    source = residents_of(ArrayId(Role.PARAM, "../../a/\0b"))
    write_arrays(tmp_path / "odd", source, {})
    with Saved(tmp_path / "odd") as opened:
        export_safetensors(opened, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "out", "saved"]
