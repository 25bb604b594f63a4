"""A manifest is read as it was written, or not at all."""

import json
from pathlib import Path

import pytest

from zinf.checkpoint.grid import Grid
from zinf.checkpoint.manifest import FILE, Manifest, StoredArray, check_same
from zinf.checkpoint.parse import read_manifest
from zinf.memory import StorageError
from zinf.program import ArrayId, ArraySpec, Role

SPECS = {
    ArrayId(Role.PARAM, "a/b"): ArraySpec((3, 4), "bfloat16", 2),
    ArrayId(Role.STATE, "a/b", slot=0): ArraySpec((), "float32", 4),
}
ARRAYS = {
    ArrayId(Role.PARAM, "a/b"): StoredArray(
        Grid(SPECS[ArrayId(Role.PARAM, "a/b")], (2, 4)), 2**64 - 1, (7, 0)
    ),
    ArrayId(Role.STATE, "a/b", slot=0): StoredArray(
        Grid(SPECS[ArrayId(Role.STATE, "a/b", slot=0)], ()), 0, (3,)
    ),
}
SCALARS = {"step": 3, "loss_scale": 65536.0, "shared": [{"value": [0.1, 1e-45]}]}


def written(directory: Path) -> Path:
    Manifest(ARRAYS, SCALARS, [1]).write(directory)
    return directory / FILE


def test_what_is_read_is_what_was_written(tmp_path):
    written(tmp_path)
    assert read_manifest(tmp_path) == Manifest(ARRAYS, SCALARS, [1])


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    path = written(tmp_path)
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 2
        path.write_bytes(flipped)
        try:
            found = read_manifest(tmp_path)
        except (StorageError, ValueError):  # ValueError: the format is another one.
            continue
        # White space may change, and what only people read.
        assert found == Manifest(ARRAYS, SCALARS, [1])


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="cut short"):
        read_manifest(tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        read_manifest(tmp_path / "absent")


@pytest.mark.parametrize("stored", [1, 3])
def test_another_format_is_refused_with_what_was_found_and_what_to_do(stored, tmp_path):
    """Its checksum may be under another name, as the one of format 1 was."""
    path = written(tmp_path)
    content = json.loads(path.read_text())
    content.update(format_version=stored, zinf_version="0.7", crc32=5)
    del content["checksum"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as refused:
        read_manifest(tmp_path)
    found, to_do = str(refused.value).split("; ")
    assert found == f"Checkpoint {tmp_path} has format {stored}, written by zinf 0.7"
    assert to_do.startswith("this zinf reads only format 2. Continue the run with that")
    assert "`zinf checkpoint export`" in to_do and "`zinf checkpoint import`" in to_do


def test_a_manifest_without_a_checksum_is_refused(tmp_path):
    path = written(tmp_path)
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_text(json.dumps(content))
    with pytest.raises(StorageError, match="does not match its checksum"):
        read_manifest(tmp_path)


def test_differences_are_named_with_both_sides(tmp_path):
    here = {
        ArrayId(Role.PARAM, "a/b"): ArraySpec((3, 5), "bfloat16", 2),
        ArrayId(Role.STATE, "a/b", slot=1): ArraySpec((2,), "float32", 4),
    }
    with pytest.raises(ValueError) as refused:
        check_same(SPECS, here, tmp_path)
    message = str(refused.value)
    assert "param/a/b: bfloat16[3, 4] there, bfloat16[3, 5] here" in message
    assert "state0/a/b: float32[] there, absent here" in message
    assert "state1/a/b: absent there, float32[2] here" in message


def test_many_differences_are_counted_but_not_all_shown(tmp_path):
    here = {ArrayId(Role.PARAM, str(i)): ArraySpec((), "int8", 1) for i in range(100)}
    with pytest.raises(ValueError, match="102 differ") as refused:
        check_same(SPECS, here, tmp_path)
    assert "and 97 more" in str(refused.value)
    assert len(str(refused.value).splitlines()) < 10
