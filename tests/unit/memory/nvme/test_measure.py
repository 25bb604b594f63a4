import errno
import os
import time
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.robustness.faults import Rule, fail, threads_of
from zinf.core.memory import StorageError
from zinf.core.memory.nvme import (
    Drive,
    Measured,
    Profile,
    measure_drive,
)
from zinf.core.memory.nvme.measure import relative_speeds

# Which the function of that name hides from attribute look-ups.
MODULE = import_module("zinf.core.memory.nvme.measure")
MIB = 2**20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "BLOCKS", (MIB, 2 * MIB))
    monkeypatch.setattr(MODULE, "THREADS", (1, 2))
    monkeypatch.setattr(MODULE, "MEASURE_BYTES", (2 * MIB, 4 * MIB))
    monkeypatch.setattr(MODULE, "SPEED_BYTES", 2 * MIB)


def test_the_first_round_is_completed_whatever_the_time(tmp_nvme):
    parts: list[float] = []
    profile, rows = measure_drive(tmp_nvme, seconds=1e-9, progress=parts.append)
    settings = [(r.profile.block_bytes // MIB, r.profile.num_threads) for r in rows]
    assert settings == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for row in rows:
        assert len(row.reads) == len(row.writes) == len(row.mixed) == 1
        assert min(row.reads + row.writes + row.mixed) > 0
    assert parts == [1.0] * 4
    chosen = rows[settings.index((profile.block_bytes // MIB, profile.num_threads))]
    assert profile.read_bytes_per_second == chosen.reads[0]
    assert profile.write_bytes_per_second == chosen.writes[0]
    assert profile.mixed_bytes_per_second == chosen.mixed[0]
    assert "1 rounds" in profile.measured
    assert os.listdir(tmp_nvme) == threads_of(tmp_nvme) == []
    with pytest.raises(OSError) as error:
        measure_drive(tmp_nvme / "missing", seconds=1e-9)
    assert error.value.errno == errno.ENOENT


def test_rounds_go_on_until_the_time_is_over(tmp_nvme, monkeypatch):
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


def test_the_score_is_low_if_any_of_the_three_is(tmp_nvme):
    even = Measured(Profile(), [1.0, 9.0, 2.0], [2.0], [2.0])
    assert even.score == pytest.approx(2.0)
    uneven = Measured(Profile(), [10.0], [10.0], [1.0])
    assert uneven.score == pytest.approx(3 / (0.1 + 0.1 + 1))


@pytest.mark.parametrize(("rate", "expected"), [(0.995, 1), (0.9, 2)])
def test_the_cheapest_of_the_good_settings_is_chosen(
    monkeypatch, tmp_nvme, rate, expected
):
    monkeypatch.setattr(MODULE, "BLOCKS", (MIB,))

    def note(row: Measured, path: Path, memory: np.ndarray) -> None:
        speed = 1e9 * (rate if row.profile.num_threads == 1 else 1)
        for rates in (row.reads, row.writes, row.mixed):
            rates.append(speed)

    monkeypatch.setattr(MODULE, "_measure_row", note)
    profile, _ = measure_drive(tmp_nvme, seconds=1e-9)
    assert profile.num_threads == expected


def test_drives_are_measured_at_once_where_one_has_no_known_speed(tmp_path, layer):
    drives = []
    for name, speed in (("a", 1e9), ("b", 3e9), ("c", None)):
        (tmp_path / name).mkdir()
        profile = Profile(num_threads=2, mixed_bytes_per_second=speed)
        drives.append(Drive(tmp_path / name, profile=profile, system=layer.system))
    assert relative_speeds(drives[:2]) == [1e9, 3e9]
    assert relative_speeds(drives[2:]) == [1.0]
    assert layer.transfers == []
    speeds = relative_speeds(drives[1:])
    assert len(speeds) == 2 and min(speeds) > 0
    # Each file is written twice: first writes are slower.
    assert sum(transfer.nbytes for transfer in layer.transfers) == 2 * 2 * 2 * MIB
    with layer.broken(Rule("pwritev", fail(errno.EIO), path=f"{tmp_path}/b/*")):
        with pytest.raises(StorageError, match="Input/output error"):
            relative_speeds(drives[1:])
    for drive in drives:
        drive.close()
        assert os.listdir(drive.folder) == []
