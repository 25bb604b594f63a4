"""What is read from a checkpoint is what was saved, or an error names the file."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.unit.checkpoint.cases import ARRAYS, STACKED
from zinf.checkpoint import write_arrays
from zinf.checkpoint.manifest import FILE, checksum_of
from zinf.checkpoint.saved import Saved
from zinf.memory import StorageError
from zinf.program import ArrayId, Role, Tier

EMBED = ArrayId(Role.PARAM, "embed")


@pytest.fixture
def saved(tmp_path: Path, open_residents) -> Path:
    directory = tmp_path / "saved"
    write_arrays(directory, open_residents([Tier.HOST]), {"num_steps": 4})
    return directory


def test_a_checkpoint_is_read_bit_for_bit_and_verified(saved):
    with Saved(saved) as found:
        assert list(found.arrays) == list(ARRAYS)
        assert found.scalars["num_steps"] == 4
        for array, value in ARRAYS.items():
            content = found.read(array)
            assert content.dtype == value.dtype and content.shape == value.shape
            assert content.tobytes() == value.tobytes()
        np.testing.assert_array_equal(found.read(EMBED, (3, 7)), ARRAYS[EMBED][3:7])
        box = ((1, 3), (0, 2), (1, 2))
        part = found.begin_read(STACKED, box).result()
        np.testing.assert_array_equal(part, ARRAYS[STACKED][1:3, 0:2, 1:2])
        assert list(found.verify()) == []


@pytest.mark.parametrize("part", [((0, 13), (0, 4)), ((-1, 2), (0, 4)), ((0, 2),)])
def test_a_part_that_an_array_has_not_is_refused(part, saved):
    with Saved(saved) as found, pytest.raises(ValueError, match="no part"):
        found.begin_read(EMBED, part)


@pytest.mark.parametrize("array", [a for a, x in ARRAYS.items() if x.size], ids=str)
def test_verify_names_array_chunk_and_file_of_any_flipped_byte(array, saved):
    with Saved(saved) as found:
        files = sorted(found.folder(array).iterdir())
        assert len(files) == 2, "metadata and one chunk"
        for file in files:
            content = bytearray(file.read_bytes())
            for position in range(0, len(content), 11):
                flipped = bytearray(content)
                flipped[position] ^= 4
                file.write_bytes(flipped)
                with Saved(saved) as again:
                    (damage,) = again.verify()
                assert (damage.array, damage.file) == (array, file)
                assert (damage.index is None) == (file.name == "zarr.json")
            file.write_bytes(content)


def test_loading_verifies_unless_told_not_to(saved):
    with Saved(saved) as found:
        file = found.folder(EMBED) / "c.0.0"
        content = bytearray(file.read_bytes())
        content[5] ^= 1
        file.write_bytes(content)
        with pytest.raises(StorageError, match="Cannot read param/embed.*checksum"):
            found.read(EMBED, (4, 5))
        whole = found.read(EMBED, verify=False)
    assert whole.tobytes() == bytes(content)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "longer", "absent"])
def test_what_is_no_chunk_file_is_refused_without_being_opened(kind, saved):
    with Saved(saved) as found:
        file = found.folder(EMBED) / "c.0.0"
        aside = file.with_name("aside")
        file.rename(aside)
        match kind:
            case "link":
                file.symlink_to(aside)
            case "folder":
                file.mkdir()
            case "pipe":
                os.mkfifo(file)
            case "longer":
                file.write_bytes(aside.read_bytes() + b"0")
        with pytest.raises(StorageError) as failed:
            found.read(EMBED)
        assert failed.value.filename == str(file)


def test_a_folder_that_is_a_link_is_refused(saved, tmp_path):
    folder = saved / "param"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="link to elsewhere"):
        Saved(saved)


def test_nothing_is_written_by_reading(saved):
    before = sorted(saved.rglob("*"))
    os.chmod(saved, 0o500)
    with Saved(saved) as found:
        found.read(EMBED)
        assert list(found.verify()) == []
        assert sorted(saved.rglob("*")) == before
    os.chmod(saved, 0o700)


WRONG = {
    "a dtype that is a pointer": ("dtype", "O"),
    "a dtype of any length": ("dtype", "S1000000000"),
    "a negative size": ("shape", [-12, 4]),
    "a size that is no number": ("shape", ["12", 4]),
    "a size that is a truth": ("shape", [True, 4]),
    "more than any drive has": ("shape", [2**62, 2**62]),
    "more chunks than checksums": ("shape", [12000, 4]),
    "too many dims": ("shape", [1] * 33),
    "chunks of no size": ("chunk", [0, 4]),
    "chunks of too many bytes": ("chunk", [2**40, 4]),
    "chunks of another rank": ("chunk", [12]),
    "a role that is no text": ("role", 3),
    "a role that there is not": ("role", "../../escape"),
    "a number that is no place": ("role", "state00"),
    "a path that is no text": ("path", None),
    "half a character": ("path", "\ud800"),
    "a checksum that is no number": ("checksums", ["x" * 16]),
    "a checksum with a sign": ("checksums", ["-" + "0" * 15]),
    "a name twice": ("role", "master"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_manifest_that_says_what_cannot_be_is_refused(wrong, saved):
    content = json.loads((saved / FILE).read_text())
    del content["checksum"]
    key, value = WRONG[wrong]
    (entry,) = (
        e for e in content["arrays"] if (e["role"], e["path"]) == ("param", "embed")
    )
    entry[key] = value
    content["checksum"] = checksum_of(content)
    (saved / FILE).write_text(json.dumps(content))
    with pytest.raises(StorageError, match="Cannot read the manifest"):
        Saved(saved)


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/passwd", "a/../../b", "..", "", "%2E%2E/b"]
)
def test_no_name_of_an_array_leads_out_of_the_folder(name, saved):
    content = json.loads((saved / FILE).read_text())
    del content["checksum"]
    content["arrays"][0].update(path=name)
    content["checksum"] = checksum_of(content)
    (saved / FILE).write_text(json.dumps(content))
    with Saved(saved) as found:
        folder = found.folder(ArrayId(Role.PARAM, name))
        assert saved in folder.parents
        assert ".." not in folder.relative_to(saved).parts
