import errno
import os
import time
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.memory.nvme.conftest import threads_of
from zinf.memory import StorageError
from zinf.memory.nvme import (
    Drive,
    Measured,
    Profile,
    System,
    find_profile,
    measure_drive,
    save_profile,
)
from zinf.memory.nvme.measure import relative_speeds
from zinf.memory.nvme.profile import PROFILE

# Which the function of that name hides from attribute look-ups.
MODULE = import_module("zinf.memory.nvme.measure")
MIB = 2**20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "BLOCKS", (MIB, 2 * MIB))
    monkeypatch.setattr(MODULE, "THREADS", (1, 2))
    monkeypatch.setattr(MODULE, "MEASURE_BYTES", (2 * MIB, 4 * MIB))
    monkeypatch.setattr(MODULE, "SPEED_BYTES", 2 * MIB)


def test_the_first_round_is_completed_whatever_the_time(tmp_nvme: Path) -> None:
    parts: list[float] = []
    profile, rows = measure_drive(tmp_nvme, seconds=1e-9, progress=parts.append)
    assert [(r.profile.block_bytes // MIB, r.profile.num_threads) for r in rows] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    for row in rows:
        assert len(row.reads) == len(row.writes) == len(row.mixed) == 1
        assert min(row.reads + row.writes + row.mixed) > 0
    assert parts == [1.0] * 4
    chosen = [
        row
        for row in rows
        if (row.profile.block_bytes, row.profile.num_threads)
        == (profile.block_bytes, profile.num_threads)
    ]
    assert profile.read_bytes_per_second == chosen[0].reads[0]
    assert profile.write_bytes_per_second == chosen[0].writes[0]
    assert profile.mixed_bytes_per_second == chosen[0].mixed[0]
    assert "1 rounds" in profile.measured


def test_rounds_go_on_until_the_time_is_over(
    tmp_nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[float] = []
    ticks = count()
    # Each look at the clock takes a second: a round looks several times.
    clock = SimpleNamespace(
        perf_counter=lambda: float(next(ticks)), strftime=time.strftime
    )
    monkeypatch.setattr(MODULE, "time", clock)
    _, (one, *_) = measure_drive(tmp_nvme, seconds=1.0, progress=parts.append)
    assert len(one.reads) == 1
    round_seconds = next(ticks)
    parts.clear()
    seconds = 2.5 * round_seconds
    _, rows = measure_drive(tmp_nvme, seconds=seconds, progress=parts.append)
    assert {len(row.reads) for row in rows} == {3}
    assert parts == sorted(parts) and parts[-1] == 1.0


def test_nothing_is_left_and_what_was_found_can_be_kept(tmp_nvme: Path) -> None:
    profile, _ = measure_drive(tmp_nvme, seconds=1e-9)
    assert os.listdir(tmp_nvme) == threads_of(tmp_nvme) == []
    save_profile(profile, tmp_nvme)
    assert find_profile(tmp_nvme) == profile


def test_the_score_is_low_if_any_of_the_three_is(tmp_nvme: Path) -> None:
    even = Measured(Profile(), [1.0, 9.0, 2.0], [2.0], [2.0])
    assert even.score == pytest.approx(2.0)
    uneven = Measured(Profile(), [10.0], [10.0], [1.0])
    assert uneven.score == pytest.approx(3 / (0.1 + 0.1 + 1))


@pytest.mark.parametrize(("rate", "expected"), [(0.995, 1), (0.9, 2)])
def test_the_cheapest_of_the_good_settings_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_nvme: Path, rate: float, expected: int
) -> None:
    monkeypatch.setattr(MODULE, "BLOCKS", (MIB,))

    def note(row: Measured, path: Path, memory: np.ndarray) -> None:
        speed = 1e9 * (rate if row.profile.num_threads == 1 else 1)
        for rates in (row.reads, row.writes, row.mixed):
            rates.append(speed)

    monkeypatch.setattr(MODULE, "_measure_row", note)
    profile, _ = measure_drive(tmp_nvme, seconds=1e-9)
    assert profile.num_threads == expected


def test_a_folder_that_is_not_there_is_an_error(tmp_nvme: Path) -> None:
    with pytest.raises(OSError) as error:
        measure_drive(tmp_nvme / "missing", seconds=1e-9)
    assert error.value.errno == errno.ENOENT


def test_one_drive_is_not_measured(tmp_nvme: Path) -> None:
    def never(*arguments: object) -> int:
        raise AssertionError("it was written")

    with Drive(tmp_nvme, system=System(pwritev=never)) as drive:
        assert relative_speeds([drive]) == [1.0]


def test_speeds_come_from_the_profiles_where_all_have_one(tmp_path: Path) -> None:
    drives = []
    for name, speed in [("a", 1e9), ("b", 3e9)]:
        (tmp_path / name).mkdir()
        save_profile(Profile(mixed_bytes_per_second=speed), tmp_path / name)
        drives.append(Drive(tmp_path / name))
    assert relative_speeds(drives) == [1e9, 3e9]
    assert threads_of(tmp_path / "a") == []


def test_speeds_are_measured_where_one_has_no_profile(tmp_path: Path) -> None:
    drives = []
    for name in "ab":
        (tmp_path / name).mkdir()
        drives.append(Drive(tmp_path / name))
    save_profile(Profile(mixed_bytes_per_second=1.0), tmp_path / "a")
    speeds = relative_speeds(drives)
    assert len(speeds) == 2 and min(speeds) > 1e6
    for drive, left in zip(drives, ([PROFILE], []), strict=True):
        drive.close()
        assert os.listdir(drive.folder) == left


def test_a_drive_that_fails_while_it_is_measured_is_an_error(tmp_path: Path) -> None:
    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "whatever")

    drives = []
    for name, system in [("a", System()), ("b", System(pwritev=broken))]:
        (tmp_path / name).mkdir()
        drives.append(Drive(tmp_path / name, system=system))
    with pytest.raises(StorageError, match="Input/output error"):
        relative_speeds(drives)
    for drive in drives:
        drive.close()
        assert os.listdir(drive.folder) == []
