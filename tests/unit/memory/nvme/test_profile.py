import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from zinf.core.memory import StorageError
from zinf.core.memory.nvme import Profile, find_profile, measured_speeds, save_profile
from zinf.core.memory.nvme.profile import PROFILE

FAST = Profile(read_bytes_per_second=3e9, write_bytes_per_second=2e9)


def test_what_was_saved_is_found_in_the_folder_and_below(tmp_path, monkeypatch):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert find_profile(deep) is None
    profile = FAST.model_copy(update={"block_bytes": 8192, "measured": "today"})
    assert save_profile(profile, tmp_path) == tmp_path / PROFILE
    assert find_profile(tmp_path) == profile
    save_profile(FAST, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a", PROFILE]
    assert (tmp_path / PROFILE).stat().st_mode & 0o777 == 0o600
    assert find_profile(deep) == find_profile(deep / "new" / "er") == FAST
    near = Profile(num_threads=2)
    save_profile(near, tmp_path / "a")
    assert find_profile(deep) == near
    monkeypatch.chdir(tmp_path)
    assert find_profile(Path("new")) == FAST
    with pytest.raises(StorageError, match="Cannot write the profile"):
        save_profile(FAST, tmp_path / "missing")


def test_another_file_system_above_has_its_own_profile(tmp_path, monkeypatch):
    mounted = tmp_path / "mounted"
    (mounted / "a").mkdir(parents=True)
    save_profile(FAST, tmp_path)
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        found = real(path, **options)
        if path.is_relative_to(mounted):
            return SimpleNamespace(st_dev=found.st_dev + 1, st_mode=found.st_mode)
        return found

    monkeypatch.setattr(Path, "stat", stat)
    assert find_profile(mounted / "a") is None
    assert find_profile(tmp_path) == FAST


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"block_bytes": 5000}', b'{"other": 1}', b"\xff\xfe{"],
)
def test_a_damaged_profile_is_an_error_and_not_ignored(tmp_path, content):
    (tmp_path / PROFILE).write_bytes(content)
    message = "(?s)not a valid.*Delete the file.*zinf bench io"
    with pytest.raises(ValueError, match=message) as error:
        find_profile(tmp_path)
    assert str(tmp_path / PROFILE) in str(error.value)


def test_settings_out_of_bounds_are_refused():
    for setting in (
        {"block_bytes": 0},
        {"block_bytes": 6000},
        {"num_threads": 0},
        {"num_threads": 65},
        {"read_bytes_per_second": 0},
        {"write_bytes_per_second": 0},
        {"mixed_bytes_per_second": 0},
        {"mixed_bytes_per_second": float("nan")},
        {"depth": 4},
    ):
        with pytest.raises(ValidationError, match=next(iter(setting))):
            Profile(**setting)
    Profile(block_bytes=4096, num_threads=1)
    Profile(block_bytes=2**30, num_threads=64)


def test_speeds_of_several_drives_add_up_if_all_are_known(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    save_profile(FAST, folders[0])
    save_profile(Profile(read_bytes_per_second=1e9), folders[1])
    assert measured_speeds(folders[:1]) == (3e9, 2e9)
    # Where only reads were measured, writes are taken to be as fast.
    assert measured_speeds(folders[:2]) == (4e9, 3e9)
    assert measured_speeds(folders) is None
    assert measured_speeds([]) is None
