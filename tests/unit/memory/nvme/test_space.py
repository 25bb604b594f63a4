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


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders on one file system that is nearly full."""
    usage = SimpleNamespace(free=FREE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    return paths


def test_what_fits_exactly_is_accepted_and_a_byte_more_is_not(folders):
    for some in (folders[:1], folders):
        check_space(some, FREE_BYTES)
        message = "1,001 bytes on this drive, which has 1,000 free: 1 too few"
        with pytest.raises(StorageError, match=message) as error:
            check_space(some, FREE_BYTES + 1)
        assert error.value.errno == errno.ENOSPC
        assert error.value.filename == ", ".join(map(str, some))
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_folders_on_several_drives_add_up(folders, monkeypatch):
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        found = real(path, **options)
        return SimpleNamespace(st_dev=folders.index(path)) if path in folders else found

    monkeypatch.setattr(Path, "stat", stat)
    check_space(folders, 2 * FREE_BYTES)
    with pytest.raises(StorageError, match="on drives with 2,000 free: 1 too few"):
        check_space(folders, 2 * FREE_BYTES + 1)


def test_a_folder_that_cannot_be_written_is_refused(folders):
    folders[1].rmdir()
    with pytest.raises(StorageError, match="Cannot write to the NVMe folder"):
        check_space(folders, 1)
