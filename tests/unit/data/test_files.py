"""Which files a dataset reads, and what is said of those that it skips."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from zinf.data import Kind, find_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bb")
    (tmp_path / "a.txt").write_bytes(b"a")
    (tmp_path / "inner" / "c.txt").write_bytes(b"ccc")
    (tmp_path / "d.md").write_text("dé")
    return tmp_path


def names(paths: list[Path], glob: str | None = None) -> list[str]:
    return [path.name for path, _ in find_files([*map(str, paths)], glob).files]


def test_a_folder_is_searched_to_any_depth_in_a_fixed_order(folder):
    assert names([folder]) == ["a.txt", "b.txt", "d.md", "c.txt"]
    assert names([folder], "*.txt") == ["a.txt", "b.txt", "c.txt"]


def test_paths_keep_their_order_and_no_file_is_read_twice(folder):
    paths = [folder / "d.md", folder, folder / "a.txt", folder]
    assert names(paths, "*.txt") == ["d.md", "a.txt", "b.txt", "c.txt"]


def test_stdlib_is_source_text_without_packages_or_tests():
    files = [path for path, _ in find_files(["stdlib"]).files]
    assert {"argparse.py", "typing.py"} < {file.name for file in files}
    assert {file.suffix for file in files} == {".py"}
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {part for file in files for part in file.relative_to(root).parts}
    assert not parts & {"site-packages", "test"}
    # Enough for the quickstart: on 3.11 to 3.13 it is about 12 MB.
    assert sum(file.stat().st_size for file in files) > 5e6


def test_what_is_skipped_of_a_mixed_folder_is_said(folder):
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (folder / "packed.gz").write_bytes(bytes(range(128, 256)) * 9)
    (folder / "empty.txt").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "rows.jsonl").write_text('{"text": "x"}\n')
    found = find_files([str(folder)])
    kinds = {path.name: kind for path, kind in found.files}
    text = dict.fromkeys(("a.txt", "b.txt", "c.txt", "d.md"), Kind.TEXT)
    assert kinds == text | {"rows.jsonl": Kind.JSON_LINES}
    assert found.summary().splitlines() == [
        "data: 5 files (4 of text, 1 of JSON lines), 23 bytes",
        "data: 1 skipped, hidden: config",
        "data: 1 skipped, empty: empty.txt",
        "data: 2 skipped, binary, no text: packed.gz, picture.png",
    ]


def test_text_of_an_old_encoding_is_text(tmp_path):
    (tmp_path / "old.txt").write_bytes(
        "Übermut tut selten gut, sagt man.".encode("latin1")
    )
    assert names([tmp_path]) == ["old.txt"]


def test_a_file_that_is_named_is_read_whatever_it_holds(tmp_path):
    (tmp_path / "any").write_bytes(b"\0\1\2")
    assert names([tmp_path / "any"]) == ["any"]


@pytest.mark.parametrize("order", [1, -1])
def test_text_and_tokens_are_not_mixed(folder, order):
    np.arange(9, dtype=np.uint16).tofile(folder / "train.bin")
    with pytest.raises(
        ValueError, match=r"\(train.bin\) and text \(a.txt, b.txt and 2"
    ):
        find_files([str(folder)])
    named = [str(folder / "train.bin"), str(folder / "a.txt")][::order]
    with pytest.raises(ValueError, match=r"data.glob='\*.bin'"):
        find_files(named)
    assert names([folder], "*.bin") == ["train.bin"]


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder '.*/absent'"):
        find_files([str(tmp_path / "absent")])


def test_a_folder_with_nothing_to_read_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match=rf"'{tmp_path}' matches '\*\.rst'"):
        find_files([str(tmp_path)], "*.rst")
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b\0\0")
    with pytest.raises(ValueError, match="1 files .* binary, no text.* unpack"):
        find_files([str(tmp_path)])
    with pytest.raises(ValueError, match="No paths"):
        find_files([])
