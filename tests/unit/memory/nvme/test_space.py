import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zinf.memory import StorageError
from zinf.memory.nvme.space import check_space

FREE_BYTES = 1000


@pytest.fixture(autouse=True)
def nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=FREE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    return paths


def test_what_fits_exactly_is_accepted(folders: list[Path]) -> None:
    check_space(folders[:1], FREE_BYTES)
    check_space(folders[:1], 0)


def test_a_byte_too_many_is_refused_with_the_figures(folders: list[Path]) -> None:
    with pytest.raises(StorageError, match="1,001 bytes.*1,000 free: 1 too few") as e:
        check_space(folders[:1], FREE_BYTES + 1)
    assert (e.value.errno, e.value.filename) == (errno.ENOSPC, str(folders[0]))


def test_folders_on_several_drives_add_up(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        found = real(path, **options)
        return SimpleNamespace(st_dev=folders.index(path)) if path in folders else found

    monkeypatch.setattr(Path, "stat", stat)
    check_space(folders, 2 * FREE_BYTES)
    with pytest.raises(StorageError, match="on drives with 2,000 free: 1 too few"):
        check_space(folders, 2 * FREE_BYTES + 1)


def test_folders_on_one_file_system_share_its_bytes(folders: list[Path]) -> None:
    check_space(folders, FREE_BYTES)
    with pytest.raises(StorageError, match="1 too few"):
        check_space(folders, FREE_BYTES + 1)


def test_a_folder_that_cannot_be_written_is_refused(folders: list[Path]) -> None:
    folders[1].rmdir()
    with pytest.raises(StorageError, match="Cannot write to the NVMe folder"):
        check_space(folders, 1)


def test_the_check_leaves_nothing_behind(folders: list[Path]) -> None:
    check_space(folders, 1)
    assert [os.listdir(folder) for folder in folders] == [[], []]
