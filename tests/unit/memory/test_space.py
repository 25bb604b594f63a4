import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from zinf.memory import StorageError
from zinf.memory.space import check_space

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
    check_space(folders[:1], FREE_BYTES, spare_bytes=0)
    check_space(folders[:1], FREE_BYTES - 100, spare_bytes=100)


def test_a_byte_too_many_is_refused_with_the_figures(folders: list[Path]) -> None:
    with pytest.raises(StorageError, match="1,001 bytes.*1,000 free: 1 too few") as e:
        check_space(folders[:1], FREE_BYTES + 1, spare_bytes=0)
    assert (e.value.errno, e.value.filename) == (errno.ENOSPC, str(folders[0]))


def test_rewriting_needs_spare_bytes_but_no_more_than_the_arrays(
    folders: list[Path],
) -> None:
    with pytest.raises(StorageError):
        check_space(folders[:1], FREE_BYTES - 100, spare_bytes=101)
    check_space(folders[:1], FREE_BYTES // 2, spare_bytes=2**40)


def test_folders_on_one_file_system_share_its_bytes(folders: list[Path]) -> None:
    check_space(folders, FREE_BYTES, spare_bytes=0)
    with pytest.raises(StorageError, match="1 too few"):
        check_space(folders, FREE_BYTES + 1, spare_bytes=0)


def test_a_folder_that_cannot_be_written_is_refused(folders: list[Path]) -> None:
    folders[1].rmdir()
    with pytest.raises(StorageError, match="Cannot write to the NVMe folder"):
        check_space(folders, 1, spare_bytes=0)


def test_the_check_leaves_nothing_behind(folders: list[Path]) -> None:
    check_space(folders, 1, spare_bytes=0)
    assert [os.listdir(folder) for folder in folders] == [[], []]
