"""A folder of the tier: ours, locked, wiped when opened, and with room."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zinf.core.memory import NvmeStore, StorageError
from zinf.core.memory.nvme.profile import PROFILE
from zinf.core.memory.nvme.root import ARRAYS, FORMAT, INDEX, LOCK, MARKER, Root
from zinf.core.memory.nvme.space import check_space

FREE_BYTES = 1000
# What `Root` does, without the seconds that it takes to import it.
HOLD_LOCK = """
import fcntl, os, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(0)
file.write(str(os.getpid()))
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def leave_behind(path: Path, *names: str) -> None:
    """What a run that was killed leaves: folders, and nobody's lock."""
    root = Root(path)
    for name in names:
        (root.arrays / name).mkdir()
        (root.arrays / name / "c.0").write_text("content")
    root.close()


def contents(path: Path) -> set[str]:
    return {found.name for found in path.iterdir()}


def expect_refused(path: Path, message: str, code: int) -> None:
    with pytest.raises(StorageError, match=message) as error:
        Root(path)
    assert error.value.errno == code


def test_a_new_folder_is_made_and_its_files_are_private(tmp_path):
    path = tmp_path / "a" / "b"
    Root(path).close()
    assert contents(path) == {MARKER, LOCK, ARRAYS}
    modes = {p.name: p.stat().st_mode & 0o777 for p in (path, *path.iterdir())}
    assert modes == {"b": 0o700, ARRAYS: 0o700, LOCK: 0o600, MARKER: 0o600}
    about = json.loads((path / MARKER).read_text())
    assert about["format"] == FORMAT
    assert "zinf" in about["about"] and INDEX in about["about"]


def test_opening_deletes_what_an_earlier_run_left_and_nothing_else(tmp_nvme, tmp_path):
    leave_behind(tmp_nvme, "000001", "000002")
    leave_behind(tmp_path / "b", "000001")
    chunk = tmp_path / "b" / ARRAYS / "000001" / "c.0"
    (tmp_nvme / ARRAYS / "000001" / "c.1").symlink_to(chunk)
    (tmp_nvme / ARRAYS / "000003").symlink_to(chunk.parent)
    (tmp_nvme / ".zinf-scratch").mkdir()
    (tmp_nvme / ".zinf-scratch" / "measured").write_text("")
    (tmp_nvme / ".zinf-probe").write_text("")
    (tmp_nvme / "notes.txt").write_text("mine")
    (tmp_nvme / "mine").mkdir()
    Root(tmp_nvme).close()
    assert contents(tmp_nvme) == {MARKER, LOCK, ARRAYS, "notes.txt", "mine"}
    assert contents(tmp_nvme / ARRAYS) == set()
    assert chunk.read_text() == "content", "deleted through a link"


@pytest.mark.parametrize("name", [PROFILE, INDEX, f"{MARKER}.new", ".zinf-left"])
def test_what_zinf_makes_before_the_marker_is_not_foreign(tmp_nvme, name):
    """A profile that was measured there, or what a run left that was killed early."""
    (tmp_nvme / name).write_text("")
    Root(tmp_nvme).close()
    assert MARKER in contents(tmp_nvme)
    (tmp_nvme / MARKER).unlink()
    (tmp_nvme / ARRAYS).rmdir()
    (tmp_nvme / "thesis.tex").write_text("mine")
    before = contents(tmp_nvme)
    expect_refused(tmp_nvme, "1 files.*thesis.tex.*empty", errno.ENOTEMPTY)
    assert contents(tmp_nvme) == before


OTHER_FORMATS = {
    json.dumps({"format": n}): f"has format {n}, of another version"
    for n in (FORMAT - 1, FORMAT + 1, "1")
}
DAMAGED = dict.fromkeys(("", "[]", "{}", "3"), "is damaged. Delete the folder")


def test_a_folder_that_is_damaged_or_of_another_version_is_refused_and_untouched(
    tmp_nvme,
):
    (tmp_nvme / ARRAYS / "000001").mkdir(parents=True)
    for content, message in (OTHER_FORMATS | DAMAGED).items():
        (tmp_nvme / MARKER).write_text(content)
        for _ in range(2):  # The first refusal does not keep the lock.
            expect_refused(tmp_nvme, message, errno.EINVAL)
        assert (tmp_nvme / ARRAYS / "000001").exists()
        assert (tmp_nvme / MARKER).read_text() == content


@pytest.mark.parametrize("path", ["file", "file/nvme"])
def test_a_path_through_a_file_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    expect_refused(tmp_path / path, "is a file", errno.ENOTDIR)


def test_a_folder_is_open_once_in_this_process(tmp_nvme):
    (tmp_nvme / LOCK).write_text("1234567890")  # A longer one, of an earlier run.
    root = Root(tmp_nvme)
    for _ in range(2):
        expect_refused(
            tmp_nvme, "in use by another engine of this process", errno.EBUSY
        )
        about = json.loads((tmp_nvme / LOCK).read_text())
        assert (about["pid"], about["host"]) == (os.getpid(), socket.gethostname())
    root.close()
    root.close()
    Root(tmp_nvme).close()


def test_a_folder_of_a_living_process_is_refused_until_it_ends(tmp_nvme):
    leave_behind(tmp_nvme, "000001")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(tmp_nvme / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        message = f"process {other.pid}.*'{tmp_nvme}'"
        expect_refused(tmp_nvme, message, errno.EBUSY)
        assert (tmp_nvme / ARRAYS / "000001").exists()
        other.kill()
        other.wait()
        Root(tmp_nvme).close()
    assert contents(tmp_nvme / ARRAYS) == set()


@pytest.mark.parametrize("name", [LOCK, MARKER, f"{MARKER}.new", f"{INDEX}.new"])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_nothing_is_written_through_a_link(tmp_path, tmp_nvme, name, link):
    """A lock or a marker that is one is refused; the others are replaced."""
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("mine")
    link(tmp_nvme / name, thesis)
    if name.endswith(".new"):
        NvmeStore([tmp_nvme]).close()
    else:
        with pytest.raises(StorageError, match="left as it is|is damaged"):
            Root(tmp_nvme)
    assert thesis.read_text() == "mine"


@pytest.mark.parametrize("content", ["mine", "[1]", '{"pid": 1}'])
def test_a_lock_file_with_other_content_is_refused_and_untouched(tmp_nvme, content):
    (tmp_nvme / LOCK).write_text(content)
    expect_refused(tmp_nvme, "something else.*left as it is", errno.EEXIST)
    assert (tmp_nvme / LOCK).read_text() == content


@pytest.mark.parametrize(
    "path", ["runs/run.json", "000100/state/manifest", "000100/notes.txt", "123456"]
)
def test_what_is_no_array_is_not_deleted_with_the_arrays(tmp_nvme, path):
    """Such as the checkpoints of a run whose output is below the NVMe folder."""
    leave_behind(tmp_nvme, "000001")
    file = tmp_nvme / ARRAYS / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    expect_refused(tmp_nvme, "is kept. Move it away", errno.ENOTEMPTY)
    assert file.read_text() == "mine"
    if file.parent == tmp_nvme / ARRAYS:
        file.unlink()
    else:
        shutil.rmtree(tmp_nvme / ARRAYS / path.partition("/")[0])
    Root(tmp_nvme).close()


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
