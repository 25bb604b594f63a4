"""Files of any kind are found, and read as one sequence of tokens, piece by piece."""

import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from zinf.data import Kind, find_files, read_tokens
from zinf.data import digest as digests_of


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
    # Paths keep their order, and no file is read twice.
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
    for i in range(6):
        (folder / ".git" / f"h{i}").write_text("hidden")
    (folder / "rows.jsonl").write_text('{"text": "x"}\n')
    found = find_files([str(folder)])
    kinds = {path.name: kind for path, kind in found.files}
    text = dict.fromkeys(("a.txt", "b.txt", "c.txt", "d.md"), Kind.TEXT)
    assert kinds == text | {"rows.jsonl": Kind.JSON_LINES}
    assert found.summary().splitlines() == [
        "data: 5 files (4 of text, 1 of JSON lines), 23 bytes",
        "data: 6 skipped, hidden: h0, h1, h2, h3, h4, ...",
        "data: 1 skipped, empty: empty.txt",
        "data: 2 skipped, binary, no text: packed.gz, picture.png",
    ]


def test_a_file_is_text_if_at_most_a_tenth_is_not_utf8(tmp_path):
    (tmp_path / "old.txt").write_bytes("Übermut".encode("latin1") + b"xyz")
    (tmp_path / "binary").write_bytes("Übermut".encode("latin1") + b"xy")
    assert names([tmp_path]) == ["old.txt"]
    # A file that is named is read whatever it holds.
    assert names([tmp_path / "binary"]) == ["binary"]


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


def test_paths_with_nothing_to_read_are_refused_with_the_reason(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder '.*/absent'"):
        find_files([str(tmp_path / "absent")])
    with pytest.raises(ValueError, match=rf"'{tmp_path}' matches '\*\.rst'"):
        find_files([str(tmp_path)], "*.rst")
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b\0\0")
    with pytest.raises(ValueError, match="1 files .* binary, no text.* unpack"):
        find_files([str(tmp_path)])
    with pytest.raises(ValueError, match="No paths"):
        find_files([])


TEXTS = ["one", "zwei ü", "", "three\nlines"]
BYTES = b"".join(text.encode() + b"\0" for text in TEXTS)


def whole(tokens) -> np.ndarray:
    found = tokens.read(0, len(tokens))
    assert found.dtype == np.int32
    # Any piece is the same as that piece of the whole.
    for start in range(len(tokens)):
        for stop in {start, start + 1, start + 4, len(tokens)}:
            stop = min(stop, len(tokens))
            assert tokens.read(start, stop).tolist() == found[start:stop].tolist()
    return found


def test_each_text_is_followed_by_a_zero_byte(tmp_path):
    for name, text in (("a", b"a"), ("b", b"bb"), ("c", b"ccc")):
        (tmp_path / name).write_bytes(text)
    assert bytes(whole(read_tokens([str(tmp_path)])).tolist()) == b"a\0bb\0ccc\0"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64"])
def test_token_arrays_are_read_as_they_are(tmp_path, dtype):
    values = np.arange(100, 160)
    np.save(tmp_path / "a.npy", values.astype(dtype).reshape(3, 20))
    np.save(tmp_path / "b.npy", values[:7].astype(">i4"))
    values.astype(dtype).tofile(tmp_path / "c.bin")
    tokens = read_tokens([str(tmp_path)], bin_dtype=dtype)
    expected = np.concatenate([values, values[:7], values])
    np.testing.assert_array_equal(whole(tokens), expected)


def json_lines(path):
    rows = [json.dumps({"id": 1, "text": text}) for text in TEXTS]
    path.write_text("\n".join([*rows[:2], "", *rows[2:]]))


def table(path, texts=TEXTS):
    columns = {"id": range(len(texts)), "text": texts}
    parquet.write_table(pa.table(columns), path, row_group_size=2)


def categories(path):
    """A column as pandas writes it if it is of categories."""
    table(path, pa.array(TEXTS).dictionary_encode())


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", json_lines), ("b.parquet", table), ("c.parquet", categories)],
)
def test_text_is_taken_out_of_rows_once(tmp_path, name, write):
    path, cache, said = tmp_path / name, tmp_path / "cache", []
    write(path)
    for _ in range(2):
        tokens = read_tokens([str(path)], cache=cache, say=said.append)
        assert bytes(whole(tokens).tolist()) == BYTES + b"\0"
    made = [text for text in said if "is written to" in text]
    assert len(made) == 1 and str(path) in made[0]
    (kept,) = cache.iterdir()
    assert kept.read_bytes() == BYTES
    # Another text of the same name, length and time is not confused with it.
    digest, before = tokens.digest(), path.stat()
    path.write_bytes(path.read_bytes().replace(b"zwei", b"drei"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    found = read_tokens([str(path)], cache=cache)
    assert found.digest() != digest
    assert b"drei" in bytes(whole(found).tolist())


REFUSED = {
    "no JSON": ('{"text": "a"}\n{"text"', "line 2: no JSON"),
    "another name": ('{"body": "a", "n": 1}', r"no text in 'text'. .* in 'body'. Name"),
    "a number": ("3", "line 1: there is no text .* must be a text, or an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_line_without_text_is_named(tmp_path, case):
    content, words = REFUSED[case]
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_tokens([str(tmp_path / "a.jsonl")], cache=tmp_path / "cache")
    assert [*(tmp_path / "cache").iterdir()] == []


def test_what_is_no_table_of_texts_is_refused(tmp_path):
    path, cache = tmp_path / "a.parquet", tmp_path / "cache"
    table(path)
    with pytest.raises(ValueError, match="no column 'id' of text, only 'text'"):
        read_tokens([str(path)], cache=cache, field="id")
    with pytest.raises(ValueError, match="Say where it may be written: `cache`"):
        read_tokens([str(path)])
    table(path, ["a", "b", None])
    with pytest.raises(ValueError, match="a.parquet, row 3: 'text' is null"):
        read_tokens([str(path)], cache=cache)
    path.write_bytes(b"PAR1 damaged")
    with pytest.raises(ValueError, match="is no parquet file, or is damaged"):
        read_tokens([str(path)], cache=cache)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3), "dtype float64, and tokens are integers"),
        (np.ones((2, 3), int).T, "is stored by columns"),
        (None, "3 bytes, which is no whole number of uint16"),
    ],
)
def test_what_is_no_array_of_tokens_is_refused(tmp_path, array, message):
    if array is None:
        (tmp_path / "a.bin").write_bytes(b"abc")
    else:
        np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=message):
        read_tokens([str(tmp_path)])


def test_a_file_that_shrinks_during_a_run_is_named(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"0123456789")
    tokens = read_tokens([str(path)])
    path.write_bytes(b"01234")
    with pytest.raises(OSError, match="had 10 tokens .* ends before token 8"):
        tokens.read(2, 8)


def test_a_sampled_digest_sees_size_ends_and_every_block_that_it_reads(
    tmp_path, monkeypatch
):
    """Of 8 blocks every other one is read; the whole digest sees all bytes."""
    monkeypatch.setattr(digests_of, "BLOCK_BYTES", 4)
    monkeypatch.setattr(digests_of, "SAMPLED_BYTES", 16)
    path, content = tmp_path / "weights", bytearray(32)

    def seen(function):
        """The bytes of which a change changes the digest."""
        digests = []
        for number in range(len(content)):
            changed = content.copy()
            changed[number] = 1
            path.write_bytes(changed)
            digests_of._digest.cache_clear()
            digests.append(function(path))
        (unread,) = {x for x in digests if digests.count(x) > 1} or {None}
        return [n for n, x in enumerate(digests) if x != unread]

    starts = [n * (32 - 4) // 3 for n in range(4)]
    read = [start + n for start in starts for n in range(4)]
    assert seen(digests_of.sampled_digest) == read and read[-1] == 31
    assert seen(digests_of.file_digest) == [*range(32)]
