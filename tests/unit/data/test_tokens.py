"""Files of any kind are one sequence of tokens, read from the drive piece by piece."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from zinf.data import read_tokens

TEXTS = ["one", "zwei ü", "", "three\nlines"]
BYTES = b"".join(text.encode() + b"\0" for text in TEXTS)


def whole(tokens) -> np.ndarray:
    found = tokens.read(0, len(tokens))
    assert found.dtype == np.int32
    # Any piece is the same as that piece of the whole.
    pieces = [(0, 0), (1, 2), (0, len(tokens)), (len(tokens) // 2, len(tokens))]
    for start, stop in pieces:
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


def table(path):
    parquet.write_table(
        pa.table({"id": range(4), "text": TEXTS}), path, row_group_size=2
    )


@pytest.mark.parametrize(
    ("name", "write"), [("a.jsonl", json_lines), ("b.parquet", table)]
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
    # Another text under the same name is not confused with it.
    path.write_bytes(path.read_bytes().replace(b"zwei", b"drei"))
    found = read_tokens([str(path)], cache=cache)
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


def test_a_column_that_is_not_there_or_no_text_is_named(tmp_path):
    table(tmp_path / "a.parquet")
    paths = [str(tmp_path / "a.parquet")]
    with pytest.raises(ValueError, match="no column 'id' of text, only 'text'"):
        read_tokens(paths, cache=tmp_path / "cache", field="id")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(ValueError, match="is no parquet file, or is damaged"):
        read_tokens(paths, cache=tmp_path / "cache")


def test_what_is_no_array_of_tokens_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3))
    with pytest.raises(ValueError, match="dtype float64, and tokens are integers"):
        read_tokens([str(tmp_path / "a.npy")])
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match="3 bytes, which is no whole number of uint16"):
        read_tokens([str(tmp_path / "a.bin")])


def test_a_file_that_shrinks_during_a_run_is_named(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"0123456789")
    tokens = read_tokens([str(path)])
    path.write_bytes(b"01234")
    with pytest.raises(OSError, match="had 10 tokens .* ends before token 8"):
        tokens.read(2, 8)
