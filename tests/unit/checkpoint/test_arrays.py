"""Arrays are restored as they were saved, on any tiers."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.unit.checkpoint.cases import ARRAYS, EMBED, STACKED
from zinf.checkpoint import read_arrays, write_arrays
from zinf.checkpoint.grid import folder_name
from zinf.core.memory import BudgetExceeded, StorageError
from zinf.core.program import ArrayId, Role, Tier

MIB = 2**20
MIXED = [Tier.NVME, Tier.DEVICE, Tier.HOST]
SCALARS = {"num_steps": 4, "shared": [0.1]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Where a checkpoint goes."""
    return tmp_path / "saved"


def blank(arrays=ARRAYS):
    return {a: np.full(x.shape, 1, x.dtype) for a, x in arrays.items()}


@pytest.mark.parametrize("there", [*([tier] for tier in Tier), MIXED], ids=str)
def test_arrays_move_between_placements_bit_for_bit(there, open_residents, saved):
    write_arrays(saved, open_residents(there), SCALARS)
    for here in ([Tier.DEVICE], [Tier.HOST], [Tier.NVME], MIXED[::-1]):
        residents = open_residents(here, blank())
        assert read_arrays(saved, residents) == SCALARS
        for array, value in ARRAYS.items():
            found = residents.read(array)
            assert found.dtype == value.dtype and found.shape == value.shape
            assert found.tobytes() == value.tobytes(), array
    found = zarr.open_array(saved / "param" / "blocks" / "kernel", mode="r")
    np.testing.assert_array_equal(found[:], ARRAYS[STACKED])


@pytest.mark.parametrize("tier", list(Tier))
def test_arrays_of_several_blocks_stay_within_two_blocks_of_the_host(
    tier, open_residents, saved
):
    """50 MiB in 5 rows are 5 blocks of 10 MiB: two blocks of 16 MiB hold three."""
    large = np.arange(5 * 5 * MIB // 2, dtype=np.float32).reshape(5, -1)
    residents = open_residents([tier], {EMBED: large})
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
    np.testing.assert_array_equal(residents.read(EMBED), large)


ROW_BYTES = 2**18


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize(
    ("host_left", "device_left"),
    [
        # One row at a time, two, and what no number of rows fills.
        (ROW_BYTES, ROW_BYTES),
        (2 * ROW_BYTES, ROW_BYTES),
        (7 * ROW_BYTES - 3, 2 * ROW_BYTES + 1),
        (25 * ROW_BYTES, ROW_BYTES),
    ],
)
def test_what_the_budgets_leave_is_enough_if_it_has_a_row(
    host_left, device_left, tier, open_residents, saved
):
    """The files are those of a save with more room, and the arrays come back."""
    # 20 MiB in two chunk files; restored into tiers that have other content.
    large = np.arange(80 * ROW_BYTES // 4, dtype=np.float32).reshape(80, -1)
    arrays = {EMBED: large}
    residents = open_residents([tier], arrays)
    plain = saved.with_name("plain")
    write_arrays(plain, residents, SCALARS)
    for at_rest in ({EMBED: large}, {EMBED: large + 1}):
        small = open_residents(
            [tier],
            at_rest,
            host_bytes=host_left + large.nbytes * (tier == Tier.HOST),
            device_bytes=device_left + large.nbytes * (tier == Tier.DEVICE),
        )
        if at_rest[EMBED] is large:
            write_arrays(saved, small, SCALARS)
            assert files_below(saved) == files_below(plain)
        read_arrays(saved, small)
        small_host = small.stores.host.ledger
        assert small_host.used_bytes == large.nbytes * (tier == Tier.HOST)
        np.testing.assert_array_equal(small.read(EMBED), large)


def files_below(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_no_room_for_a_row_is_an_error_that_leaves_nothing_counted(
    open_residents, saved
):
    arrays, nbytes = {EMBED: ARRAYS[EMBED]}, ARRAYS[EMBED].nbytes
    row_bytes = ARRAYS[EMBED][0].nbytes
    residents = open_residents([Tier.HOST], arrays, host_bytes=nbytes + row_bytes - 1)
    with pytest.raises(BudgetExceeded, match="saving a checkpoint"):
        write_arrays(saved, residents, {})
    assert residents.stores.host.ledger.used_bytes == nbytes
    residents.write(EMBED, ARRAYS[EMBED] + 1)  # and nothing is held
    exact = open_residents([Tier.HOST], arrays, host_bytes=nbytes + row_bytes)
    write_arrays(saved, exact, {})


def test_another_model_or_refused_scalars_change_nothing(open_residents, saved):
    write_arrays(saved, open_residents([Tier.HOST]), SCALARS)

    def refuse(scalars):
        assert scalars == SCALARS
        raise ValueError("another optimizer")

    others = {**blank(), EMBED: np.ones((12, 5), np.float32)}
    refusals = (
        (others, {}, "param/embed.*12, 4.* there.*12, 5.* here"),
        (blank(), {"take_scalars": refuse}, "another optimizer"),
    )
    for arrays, options, words in refusals:
        residents = open_residents([Tier.HOST], arrays)
        with pytest.raises(ValueError, match=words):
            read_arrays(saved, residents, **options)
        for array, value in arrays.items():
            np.testing.assert_array_equal(residents.read(array), value)


def test_a_checkpoint_is_never_overwritten_nor_begun_where_it_cannot_be(
    open_residents, saved, monkeypatch
):
    residents = open_residents([Tier.HOST])
    needed_bytes = sum(spec.nbytes for spec in residents.specs.values())
    usage = shutil.disk_usage
    for missing in (1, 0):
        room = usage(saved.parent)._replace(free=needed_bytes - missing)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, room=room: room)
        if missing:
            with pytest.raises(StorageError, match="1 too few"):
                write_arrays(saved, residents, {})
            assert not saved.exists()
        else:
            write_arrays(saved, residents, {})
    with pytest.raises(FileExistsError, match="never overwritten"):
        write_arrays(saved, residents, {})
    through = saved / "manifest.json" / "saved"
    with pytest.raises(StorageError) as failed:
        write_arrays(through, residents, {})
    assert failed.value.filename.startswith(str(through.parent))


def test_names_are_folders_inside_the_checkpoint_and_stay_different():
    names = ["a", "a.b", "a%2Eb", "..", ".", "c.0", "zarr.json", "", "a b", "a\\b", "é"]
    folders = [folder_name(ArrayId(Role.PARAM, name)) for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        role, part = folder.split("/")
        assert role == Role.PARAM and part not in {"", ".", "..", "zarr.json", "c.0"}
    for name in ("../../escape", "/etc/passwd", "a/../../b", "%2E%2E/b"):
        parts = folder_name(ArrayId(Role.PARAM, name)).split("/")
        assert parts[0] == Role.PARAM and not {"", ".", ".."} & set(parts)
