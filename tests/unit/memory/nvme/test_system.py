import ctypes
import errno
import os

import numpy as np
import pytest

from tests.robustness.faults import open_files
from zinf.core.memory.nvme import System, system
from zinf.core.memory.nvme.system import read_at, write_at

REFUSED = {errno.EAGAIN, errno.ENOSYS, errno.EPERM}


def test_a_file_that_the_kernel_knows_is_opened_without_asking_a_drive(tmp_nvme):
    path = tmp_nvme / "file"
    path.write_bytes(b"content")
    path.read_bytes()
    try:
        descriptor = System().open_cached(path, os.O_RDONLY)
    except OSError as error:
        assert error.errno in REFUSED
        pytest.skip(f"the kernel refuses: {error}")
    try:
        assert os.pread(descriptor, 100, 0) == b"content"
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
    assert open_files(tmp_nvme) == []
    with pytest.raises(OSError) as missing:
        System().open_cached(tmp_nvme / "missing", os.O_RDONLY)
    assert missing.value.errno in REFUSED | {errno.ENOENT}
    assert missing.value.filename == str(tmp_nvme / "missing")


def test_a_file_of_another_owner_is_opened_too(monkeypatch, tmp_path):
    """Linux refuses O_NOATIME for it."""
    tried = []

    def openat2(path, how):
        tried.append(bool(how.flags & os.O_NOATIME))
        ctypes.set_errno(errno.EPERM)
        return -1 if tried[-1] else 7

    monkeypatch.setattr(system, "_openat2", openat2)
    assert System().open_cached(tmp_path, os.O_RDONLY) == 7
    assert tried == [True, False]


@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_a_seek_moves_what_preadv_and_pwritev_move(tmp_nvme, nbytes):
    """For systems without them: short at the end of the file, and past it nothing."""
    content = bytes(range(256)) * 40
    with open(tmp_nvme / "file", "w+b", buffering=0) as file:
        number = file.fileno()
        os.write(number, content)
        assert write_at(number, [np.full(nbytes, 7, np.uint8)], 300) == nbytes
        content = content[:300] + bytes([7] * nbytes) + content[300 + nbytes :]
        for start in (0, 299, len(content) - nbytes // 2, len(content), 99_999):
            memory, expected = (np.zeros(nbytes, np.uint8) for _ in range(2))
            count = os.preadv(number, [expected], start)
            assert read_at(number, [memory], start) == count
            np.testing.assert_array_equal(memory, expected)
        assert os.pread(number, 99_999, 0) == content
