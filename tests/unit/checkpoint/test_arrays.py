"""Arrays are restored as they were saved, or an error says which one is not."""

import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.unit.checkpoint.cases import ARRAYS, STACKED
from zinf.checkpoint import read_arrays, write_arrays
from zinf.checkpoint.grid import folder_name
from zinf.memory import BudgetExceeded, StorageError
from zinf.program import ArrayId, Role, Tier

MIB = 2**20
EMBED = ArrayId(Role.PARAM, "embed")
PLACEMENTS = {
    "device": [Tier.DEVICE],
    "host": [Tier.HOST],
    "nvme": [Tier.NVME],
    "mixed": [Tier.NVME, Tier.DEVICE, Tier.HOST],
}
SCALARS = {"num_steps": 4, "shared": [0.1]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Where a checkpoint goes."""
    return tmp_path / "saved"


def blank(arrays=ARRAYS):
    return {
        array: np.full(value.shape, 1, value.dtype) for array, value in arrays.items()
    }


@pytest.mark.parametrize(("there", "here"), list(product(PLACEMENTS, PLACEMENTS)))
def test_arrays_move_between_placements_bit_for_bit(there, here, open_residents, saved):
    write_arrays(saved, open_residents(PLACEMENTS[there]), SCALARS)
    residents = open_residents(PLACEMENTS[here], blank())
    assert read_arrays(saved, residents) == SCALARS
    for array, value in ARRAYS.items():
        found = residents.read(array)
        assert found.dtype == value.dtype and found.shape == value.shape
        assert found.tobytes() == value.tobytes(), array


@pytest.mark.parametrize("tier", list(Tier))
def test_arrays_of_several_blocks_stay_within_two_blocks_of_the_host(
    tier, open_residents, saved
):
    """80 MiB in 8 rows are 8 blocks of 10 MiB: two blocks of 16 MiB hold three."""
    arrays = {
        ArrayId(Role.PARAM, "large"): np.arange(8 * 5 * MIB // 2, dtype=np.float32)
    }
    arrays = {a: x.reshape(8, -1) for a, x in arrays.items()}
    residents = open_residents([tier], arrays)
    tiers = (Tier.HOST, Tier.DEVICE)
    ledgers = {held: residents.stores[held].ledger for held in tiers}
    rest_bytes = {held: ledger.used_bytes for held, ledger in ledgers.items()}
    at_most = {Tier.HOST: 32 * MIB, Tier.DEVICE: 10 * MIB * (tier == Tier.DEVICE)}
    for move in (write_arrays, read_arrays):
        for ledger in ledgers.values():
            ledger.reset_peak()
        move(saved, residents, *([{}] if move is write_arrays else []))
        for held, ledger in ledgers.items():
            # Files on nvme are linked.
            is_moved = move is read_arrays or tier != Tier.NVME
            assert ledger.used_bytes == rest_bytes[held]
            expected = rest_bytes[held] + at_most[held] * is_moved
            assert ledger.peak_bytes == expected
    for array, value in arrays.items():
        np.testing.assert_array_equal(residents.read(array), value)


def test_no_room_for_blocks_is_an_error_that_leaves_nothing_counted(
    open_residents, saved
):
    arrays = {EMBED: ARRAYS[EMBED]}
    nbytes = ARRAYS[EMBED].nbytes
    residents = open_residents([Tier.HOST], arrays, host_bytes=2 * nbytes - 1)
    with pytest.raises(BudgetExceeded, match="saving a checkpoint"):
        write_arrays(saved, residents, {})
    assert residents.stores.host.ledger.used_bytes == nbytes
    residents.write(EMBED, ARRAYS[EMBED] + 1)  # and nothing is held


def test_any_zarr_reader_opens_a_saved_array(open_residents, saved):
    write_arrays(saved, open_residents([Tier.NVME]), {})
    found = zarr.open_array(saved / "param" / "blocks" / "kernel", mode="r")
    np.testing.assert_array_equal(found[:], ARRAYS[STACKED])


def chunk_files(directory: Path, array: ArrayId) -> list[Path]:
    return sorted((directory / folder_name(array)).glob("c*"))


@pytest.mark.parametrize("array", [a for a, x in ARRAYS.items() if x.size], ids=str)
def test_a_flipped_byte_is_an_error_that_names_the_array(array, open_residents, saved):
    residents = open_residents([Tier.HOST])
    write_arrays(saved, residents, {})
    (file,) = chunk_files(saved, array)
    for position in (0, -1):
        content = bytearray(file.read_bytes())
        content[position] ^= 1
        file.write_bytes(content)
        with pytest.raises(StorageError, match="Cannot read") as failed:
            read_arrays(saved, residents)
        assert str(array) in str(failed.value)
        assert failed.value.filename == str(file)
        content[position] ^= 1
        file.write_bytes(content)
    read_arrays(saved, residents)


@pytest.mark.parametrize("name", ["c.0.0", "zarr.json"])
def test_a_missing_file_is_an_error_that_names_the_array(name, open_residents, saved):
    residents = open_residents([Tier.HOST])
    write_arrays(saved, residents, {})
    (saved / "param" / "embed" / name).unlink()
    with pytest.raises(StorageError, match="Cannot read param/embed"):
        read_arrays(saved, residents)


def test_a_truncated_file_is_an_error_that_names_the_array(open_residents, saved):
    residents = open_residents([Tier.HOST])
    write_arrays(saved, residents, {})
    (file,) = chunk_files(saved, ArrayId(Role.PARAM, "embed"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match="Cannot read param/embed"):
        read_arrays(saved, residents)


def test_a_checkpoint_of_another_model_changes_nothing(open_residents, saved):
    write_arrays(saved, open_residents([Tier.HOST]), {})
    others = {**blank(), ArrayId(Role.PARAM, "embed"): np.ones((12, 5), np.float32)}
    residents = open_residents([Tier.HOST], others)
    with pytest.raises(ValueError, match="param/embed.*12, 4.* there.*12, 5.* here"):
        read_arrays(saved, residents)
    for array, value in others.items():
        np.testing.assert_array_equal(residents.read(array), value)


def test_scalars_can_be_refused_before_an_array_changes(open_residents, saved):
    write_arrays(saved, open_residents([Tier.HOST]), SCALARS)
    residents = open_residents([Tier.HOST], blank())

    def refuse(scalars):
        assert scalars == SCALARS
        raise ValueError("another optimizer")

    with pytest.raises(ValueError, match="another optimizer"):
        read_arrays(saved, residents, take_scalars=refuse)
    for array, value in blank().items():
        np.testing.assert_array_equal(residents.read(array), value)


def test_a_checkpoint_is_never_overwritten(open_residents, saved):
    residents = open_residents([Tier.HOST])
    write_arrays(saved, residents, {})
    with pytest.raises(FileExistsError, match="never overwritten"):
        write_arrays(saved, residents, {})


def test_a_drive_that_is_too_small_is_found_before_anything_is_written(
    open_residents, saved, monkeypatch
):
    residents = open_residents([Tier.HOST])
    needed_bytes = sum(spec.nbytes for spec in residents.specs.values())
    room = shutil.disk_usage(saved.parent)._replace(free=needed_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(StorageError, match="1 too few"):
        write_arrays(saved, residents, {})
    assert not saved.exists()


def test_a_path_through_a_file_is_an_error_that_names_it(open_residents, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as failed:
        write_arrays(tmp_path / "file" / "saved", open_residents([Tier.HOST]), {})
    assert failed.value.filename.startswith(str(tmp_path / "file"))


def test_names_are_folders_inside_the_checkpoint_and_stay_different():
    names = ["a", "a.b", "a%2Eb", "..", ".", "c.0", "zarr.json", "", "a b", "a\\b", "é"]
    folders = [folder_name(ArrayId(Role.PARAM, name)) for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        role, part = folder.split("/")
        assert role == Role.PARAM and part not in {"", ".", "..", "zarr.json", "c.0"}
