import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zinf.memory import StorageError
from zinf.memory.root import LOCK, MARKER, Root
from zinf.program import ArrayId

HOLD_LOCK = """
import fcntl, os, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(str(os.getpid()))
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def leave_behind(path: Path, *arrays: ArrayId) -> None:
    """What a run that was killed leaves: folders, and nobody's lock."""
    root = Root(path)
    for array in arrays:
        folder = root.folder(array)
        folder.mkdir(parents=True)
        (folder / "zarr.json").write_text("{}")
    root.close()


def test_a_new_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    root = Root(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / MARKER).is_file()
    root.close()


def test_opening_deletes_what_an_earlier_run_left_and_nothing_else(
    tmp_nvme: Path,
) -> None:
    leave_behind(tmp_nvme, ArrayId("param", "a/b"), ArrayId("grad", "a/b"))
    (tmp_nvme / "notes.txt").write_text("mine")
    (tmp_nvme / "mine").mkdir()
    Root(tmp_nvme).close()
    assert {path.name for path in tmp_nvme.iterdir()} == {
        MARKER,
        LOCK,
        "notes.txt",
        "mine",
    }


def test_a_folder_with_other_content_is_refused_and_untouched(tmp_nvme: Path) -> None:
    (tmp_nvme / "thesis.tex").write_text("mine")
    with pytest.raises(StorageError, match="1 files.*thesis.tex.*empty") as error:
        Root(tmp_nvme)
    assert error.value.errno == errno.ENOTEMPTY
    assert os.listdir(tmp_nvme) == ["thesis.tex"]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"roles": 3}', '{"roles": [3]}']
    + [json.dumps({"roles": [role]}) for role in ("..", ".", "../x", "/etc")],
)
def test_a_damaged_marker_deletes_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "x").mkdir()
    (tmp_path / "nvme" / MARKER).write_text(content)
    for _ in range(2):  # The first refusal does not keep the lock.
        with pytest.raises(StorageError, match="damaged"):
            Root(tmp_path / "nvme")
    assert (tmp_path / "x").exists()
    assert (tmp_path / "nvme" / MARKER).read_text() == content


@pytest.mark.parametrize("path", ["file", "file/nvme"])
def test_a_path_through_a_file_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file") as error:
        Root(tmp_path / path)
    assert error.value.errno == errno.ENOTDIR


def test_a_folder_is_open_once_in_this_process(tmp_nvme: Path) -> None:
    root = Root(tmp_nvme)
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
        Root(tmp_nvme)
    root.close()
    Root(tmp_nvme).close()


def test_a_folder_of_a_living_process_is_refused_until_it_ends(tmp_nvme: Path) -> None:
    leave_behind(tmp_nvme, ArrayId("param", "a"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(tmp_nvme / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(StorageError, match=f"process {other.pid}") as error:
            Root(tmp_nvme)
        assert error.value.errno == errno.EBUSY
        assert (tmp_nvme / "param" / "a").exists()
        other.kill()
        other.wait()
        Root(tmp_nvme).close()
    assert not (tmp_nvme / "param").exists()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (ArrayId("param", "blocks/0/kernel"), "param/blocks/0/kernel"),
        (ArrayId("param", ""), "param/@"),
        (ArrayId("param", "a//b"), "param/a/@/b"),
        (ArrayId("value", "x", microbatch=2), "value/x@microbatch=2"),
        (ArrayId("grad", "x", rows=(1, 2)), "grad/x@rows=1-2"),
        (ArrayId("grad", "x", (1, 2), 0), "grad/x@rows=1-2@microbatch=0"),
        (ArrayId("param", "x@rows=1-2"), "param/x%40rows=1-2"),
        (ArrayId("param", "../../x"), "param/%2E./%2E./x"),
        (ArrayId("param", "a/c"), "param/a/%63"),
        (ArrayId("param", "a/c.0"), "param/a/%63.0"),
        (ArrayId("param", "a/zarr.json"), "param/a/%7Aarr.json"),
        (ArrayId("param", "a%2Fb/Ünicode"), "param/a%252Fb/%C3%9Cnicode"),
    ],
    ids=lambda value: str(value),
)
def test_every_id_has_a_folder_of_its_own_inside_its_role(
    tmp_nvme: Path, array: ArrayId, expected: str
) -> None:
    root = Root(tmp_nvme)
    assert root.folder(array) == tmp_nvme / expected
    root.close()


def test_a_role_is_on_record_before_its_folder_is_used(tmp_nvme: Path) -> None:
    """So that a run that is killed at any moment leaves only what it can claim."""
    root = Root(tmp_nvme)
    root.folder(ArrayId("param", "a"))
    root.folder(ArrayId("state0", "a"))
    assert json.loads((tmp_nvme / MARKER).read_text())["roles"] == ["param", "state0"]
    root.close()
