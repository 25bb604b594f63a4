"""What is read from a checkpoint is what was saved, or an error names the file."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.golden import Golden
from tests.unit.checkpoint.cases import ARRAYS, EMBED, STACKED, flipped
from zinf.checkpoint import read_arrays, write_arrays
from zinf.checkpoint.grid import Grid
from zinf.checkpoint.manifest import (
    FILE,
    Manifest,
    StoredArray,
    check_same,
    checksum_of,
)
from zinf.checkpoint.parse import read_manifest
from zinf.checkpoint.saved import Saved
from zinf.core.memory import StorageError
from zinf.core.program import ArrayId, ArraySpec, Role, Tier

SCALARS = {"num_steps": 4, "loss_scale": 65536.0, "shared": [{"value": [0.1, 1e-45]}]}


@pytest.fixture
def saved(tmp_path: Path, open_residents) -> Path:
    directory = tmp_path / "saved"
    write_arrays(directory, open_residents([Tier.HOST]), SCALARS, [1])
    return directory


def test_a_checkpoint_is_read_bit_for_bit_and_nothing_is_written(saved):
    before = sorted(saved.rglob("*"))
    os.chmod(saved, 0o500)
    with Saved(saved) as found:
        assert list(found.arrays) == list(ARRAYS)
        assert (found.scalars, found.data) == (SCALARS, [1])
        for array, value in ARRAYS.items():
            content = found.read(array)
            assert content.dtype == value.dtype and content.shape == value.shape
            assert content.tobytes() == value.tobytes()
        np.testing.assert_array_equal(found.read(EMBED, (3, 7)), ARRAYS[EMBED][3:7])
        box = ((1, 3), (0, 2), (1, 2))
        part = found.begin_read(STACKED, box).result()
        np.testing.assert_array_equal(part, ARRAYS[STACKED][1:3, 0:2, 1:2])
        for part in (((0, 13), (0, 4)), ((-1, 2), (0, 4)), ((3, 2), (0, 4)), ((0, 2),)):
            with pytest.raises(ValueError, match="no part"):
                found.begin_read(EMBED, part)
        assert list(found.verify()) == []
    assert sorted(saved.rglob("*")) == before
    os.chmod(saved, 0o700)


def test_verify_names_the_chunk_of_several_that_was_changed(open_residents, tmp_path):
    """Chunks of 8 MiB."""
    large = np.random.default_rng(0).random((5, 2**20))
    write_arrays(tmp_path / "saved", open_residents([Tier.HOST], {EMBED: large}), {})
    first, second, *_, last = sorted((tmp_path / "saved").rglob("c.*"))
    contents = [file.read_bytes() for file in (first, second, last)]

    def damages() -> list[tuple[Path, tuple[int, ...] | None]]:
        with Saved(tmp_path / "saved") as saved:
            return [(damage.file, damage.index) for damage in saved.verify()]

    for position in np.random.default_rng(1).integers(0, 8 * 2**20, 3):
        last.write_bytes(flipped(contents[2], position))
        assert damages() == [(last, (4, 0))]
    last.write_bytes(contents[2])
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert damages() == [(first, (0, 0)), (second, (1, 0))]


def change(file: Path, how: str) -> None:
    content, aside = file.read_bytes(), file.with_name("aside")
    file.rename(aside)
    match how:
        case "link":
            file.symlink_to(aside)
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "shorter":
            file.write_bytes(content[:-1])
        case "longer":
            file.write_bytes(content + b"0")
        case "flipped":
            file.write_bytes(flipped(content, 5))


@pytest.mark.parametrize("name", ["c.0.0", "zarr.json"])
@pytest.mark.parametrize(
    "how", ["link", "folder", "pipe", "shorter", "longer", "flipped", "absent"]
)
def test_a_file_that_is_not_what_was_saved_is_refused_by_name_in_any_read(
    how, name, saved, open_residents
):
    """A pipe is not waited for, and what is too long is not read."""
    file = saved / "param" / "embed" / name
    change(file, how)
    residents = open_residents([Tier.HOST])
    reads = [lambda: found.read(EMBED, (4, 5)), lambda: read_arrays(saved, residents)]
    with Saved(saved) as found:
        for read in reads:
            with pytest.raises(StorageError, match="Cannot read param/embed") as failed:
                read()
            assert failed.value.filename == str(file)
        (damage,) = found.verify()
        assert (damage.array, damage.file) == (EMBED, file)
        if how == "flipped":  # Loading verifies unless told not to.
            unverified = found.read(EMBED, verify=False)
            is_same = unverified.tobytes() == ARRAYS[EMBED].tobytes()
            assert is_same == (name == "zarr.json")


def test_a_folder_that_is_a_link_is_refused(saved, tmp_path):
    folder = saved / "param"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="link to elsewhere"):
        Saved(saved)


# The manifest.

WRONG = (
    *(("dtype", "O"), ("dtype", "S1000000000"), ("role", 3), ("path", None)),
    *(("shape", [-12, 4]), ("shape", ["12", 4]), ("shape", [True, 4])),
    *(
        ("shape", [2**62, 2**62]),
        ("shape", [2**58, 1]),
        ("shape", [2**58 + 1, 1]),
        ("shape", [12000, 4]),
    ),
    *(("shape", [1] * 33), ("shape", [1] * 32), ("chunk", [0, 4]), ("chunk", [12])),
    *(("chunk", [2**40, 4]), ("chunk", [2**26 + 1, 4]), ("chunk", [2**26, 4])),
    *(("role", "../../escape"), ("role", "state00"), ("path", "\ud800")),
    *(("checksums", ["x" * 16]), ("checksums", ["-" + "0" * 15]), ("checksums", [])),
    *(("metadata", "0"), ("metadata", None), ("role", "master")),
)


def test_a_manifest_that_says_what_cannot_be_is_refused(saved, golden: Golden):
    """Sizes at the limits are in the table with those beyond them."""
    original, lines = json.loads((saved / FILE).read_text()), []
    del original["checksum"]
    for key, value in WRONG:
        content = json.loads(json.dumps(original))
        entry = next(e for e in content["arrays"] if e["role"] == "param")
        assert entry["path"] == "embed"
        entry[key] = value
        content["checksum"] = checksum_of(content)
        (saved / FILE).write_text(json.dumps(content))
        try:
            Saved(saved)
            found = "can be"
        except StorageError as error:
            found = str(error).partition("manifest: ")[2].partition(". The")[0]
        lines.append(f"{key} {value!r:.40}: {found}")
    golden.check("manifest.txt", "\n".join(lines))


def test_no_flipped_bit_of_a_manifest_goes_unnoticed(saved):
    path, expected = saved / FILE, read_manifest(saved)
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        path.write_bytes(flipped(content, position))
        try:
            found = read_manifest(saved)
        except (StorageError, ValueError):  # ValueError: the format is another one.
            continue
        # White space may change, and what only people read.
        assert found == expected
    path.unlink()
    with pytest.raises(FileNotFoundError, match="cut short"):
        Saved(saved)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        Saved(saved / "absent")


@pytest.mark.parametrize("stored", [1, 3])
def test_another_format_is_refused_with_what_was_found_and_what_to_do(stored, saved):
    """Its checksum may be under another name, as the one of format 1 was."""
    content = json.loads((saved / FILE).read_text())
    content.update(format_version=stored, zinf_version="0.7", crc32=5)
    del content["checksum"]
    (saved / FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError) as refused:
        read_manifest(saved)
    found, to_do = str(refused.value).split("; ")
    assert found == f"Checkpoint {saved} has format {stored}, written by zinf 0.7"
    assert to_do.startswith("this zinf reads only format 2. Continue the run with that")
    assert "`zinf checkpoint export`" in to_do and "`zinf checkpoint import`" in to_do
    content["format_version"] = 2  # And without a checksum it is damaged.
    (saved / FILE).write_text(json.dumps(content))
    with pytest.raises(StorageError, match="does not match its checksum"):
        read_manifest(saved)


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    name, scale = ArrayId(Role.PARAM, "a/b"), ArrayId(Role.STATE, "a/b", slot=0)
    grids = {
        name: Grid(ArraySpec((3, 4), "bfloat16", 2), (2, 4)),
        scale: Grid(ArraySpec((), "float32", 4), ()),
    }
    arrays = {
        name: StoredArray(grids[name], 2**64 - 1, (7, 0)),
        scale: StoredArray(grids[scale], 0, (3,)),
    }
    (tmp_path / FILE).write_bytes(Manifest(arrays, SCALARS, [1]).encoded())
    assert read_manifest(tmp_path) == Manifest(arrays, SCALARS, [1])


def test_differences_are_named_with_both_sides_and_counted(golden: Golden):
    specs = {
        ArrayId(Role.PARAM, "a/b"): ArraySpec((3, 4), "bfloat16", 2),
        ArrayId(Role.STATE, "a/b", slot=0): ArraySpec((), "float32", 4),
    }
    here = {
        ArrayId(Role.PARAM, "a/b"): ArraySpec((3, 5), "bfloat16", 2),
        ArrayId(Role.STATE, "a/b", slot=1): ArraySpec((2,), "float32", 4),
    }
    many = {ArrayId(Role.PARAM, str(i)): ArraySpec((), "int8", 1) for i in range(100)}
    texts = []
    for other in (here, many):
        with pytest.raises(ValueError) as refused:
            check_same(specs, other, Path("/runs/3"))
        texts.append(str(refused.value))
    golden.check("differences.txt", "\n\n".join(texts))
