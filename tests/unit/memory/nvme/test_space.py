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


def test_what_fits_exactly_on_the_drives_is_accepted_and_a_byte_more_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=FREE_BYTES)
    )
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    for some in (folders[:1], folders):
        check_space(some, FREE_BYTES)
        message = "1,001 bytes on this drive, which has 1,000 free: 1 too few"
        with pytest.raises(StorageError, match=message) as error:
            check_space(some, FREE_BYTES + 1)
        assert error.value.errno == errno.ENOSPC
        assert error.value.filename == ", ".join(map(str, some))
    assert [os.listdir(folder) for folder in folders] == [[], []]
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        """Of folders on drives of their own."""
        found = real(path, **options)
        return SimpleNamespace(st_dev=folders.index(path)) if path in folders else found

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat)
        check_space(folders, 2 * FREE_BYTES)
        with pytest.raises(StorageError, match="on drives with 2,000 free: 1 too few"):
            check_space(folders, 2 * FREE_BYTES + 1)
    folders[1].rmdir()
    with pytest.raises(StorageError, match="Cannot write to the NVMe folder"):
        check_space(folders, 1)
