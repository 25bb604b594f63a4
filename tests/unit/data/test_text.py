"""Promises of `zinf.data.text`, on a few hundred bytes."""

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zinf.data import read_tokens, text_dataset
from zinf.data.text import TokenWindows, tokens_hash

WINDOW = 4  # sequence_length of the datasets below
NUMBERS = bytes(range(1, 201))  # each byte once: a token tells its place


@pytest.fixture
def numbers(tmp_path: Path) -> list[str]:
    (tmp_path / "numbers").write_bytes(NUMBERS)
    return [str(tmp_path / "numbers")]


def batches(paths: list[str], **changes: Any) -> Iterator[dict[str, np.ndarray]]:
    settings = {
        "glob": "*",
        "sequence_length": WINDOW,
        "batch_size": 5,
        "seed": 0,
        "split": "train",
        "validation_fraction": 0.0,
    }
    return iter(text_dataset(paths, **settings | changes))


def taken(iterator: Iterator[dict[str, np.ndarray]], count: int) -> list[Any]:
    return [batch["tokens"].tolist() for batch in islice(iterator, count)]


@pytest.mark.parametrize("num_tokens", [0, 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
def test_windows_predict_each_token_once(num_tokens: int, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(num_tokens, dtype=np.uint8))
    tokens = read_tokens([str(tmp_path / "t.npy")])
    windows = TokenWindows(tokens, sequence_length=WINDOW)
    # The first token is only read, and the rest fills whole windows.
    assert len(windows) == max(0, num_tokens - 1) // WINDOW
    predicted = [t for i in range(len(windows)) for t in windows[i]["tokens"][1:]]
    assert predicted == list(range(1, 1 + len(windows) * WINDOW))


def test_an_epoch_holds_every_window_once_and_the_next_another_order(
    numbers: list[str],
) -> None:
    # 200 bytes and a separator: 200 / 4 = 50 windows, 10 batches of 5.
    found = list(batches(numbers, num_epochs=2))
    assert len(found) == 20 and found[0]["tokens"].dtype == np.int32
    rows = np.concatenate([batch["tokens"] for batch in found])
    assert all(bytes(row.astype(np.uint8)) in NUMBERS + b"\0" for row in rows)
    first, second = rows[:50].tolist(), rows[50:].tolist()
    assert first != second and sorted(first) == sorted(second)
    assert len({tuple(row) for row in first}) == 50


def test_equal_seeds_give_equal_batches_and_others_do_not(numbers: list[str]) -> None:
    first, again, other = (taken(batches(numbers, seed=seed), 30) for seed in (3, 3, 4))
    assert first == again != other


def test_a_position_is_restored_after_later_batches_were_taken(
    numbers: list[str],
) -> None:
    iterator = batches(numbers)
    taken(iterator, 17)
    state = iterator.get_state()
    expected = taken(iterator, 5)
    iterator.set_state(state)
    assert taken(iterator, 5) == expected


def test_splits_share_no_byte_and_leave_none_out(numbers: list[str]) -> None:
    named = {"validation_fraction": 0.25, "num_epochs": 1, "batch_size": 1}
    train, validation = (
        {int(t) for b in batches(numbers, split=s, **named) for t in b["tokens"].flat}
        for s in ("train", "validation")
    )
    # Of 201 bytes the last 50 are held out: 151.. and the separator. What fills no
    # window at the end of a split is left out: 2 tokens of 151, 1 of 50.
    assert train == {*range(1, 150)}
    assert validation == {*range(152, 201)}


def test_held_out_windows_that_do_not_fill_a_batch_are_followed_by_rows_of_none(
    numbers: list[str],
) -> None:
    named = {"split": "validation", "validation_fraction": 0.25, "num_epochs": 1}
    found = [
        sorted(
            row.tolist()
            for b in batches(numbers, **named, batch_size=n)
            for row in b["tokens"]
        )
        for n in (1, 8, 64)
    ]
    rows = found[0]
    none = [-1] * len(rows[0])
    assert found == [
        rows,
        [none] * (-len(rows) % 8) + rows,
        [none] * (64 - len(rows)) + rows,
    ]


def test_no_thread_or_process_is_started(numbers: list[str]) -> None:
    before = threading.active_count()
    taken(batches(numbers), 5)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 51}, "201 tokens, which is 50 windows .* is 51"),
        ({"split": "validation"}, "validation split has 0 tokens.*raise valid"),
        ({"split": "test"}, "split is 'test'"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"validation_fraction": -0.1}, "validation_fraction is -0.1"),
    ],
)
def test_impossible_settings_are_named(
    changes: dict[str, Any], message: str, numbers: list[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        batches(numbers, **changes)


WRAPS = {"<i8": 2**40 + 7, ">i8": -(2**32) + 7, "<u8": 2**63 + 7, "<u4": 2**32 - 1}


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
@pytest.mark.parametrize("dtype", WRAPS)
def test_a_token_that_int32_does_not_hold_is_refused_not_wrapped(
    dtype: str, suffix: str, tmp_path: Path
) -> None:
    named = {"batch_size": 1, "sequence_length": 5, "num_epochs": 1}
    path = tmp_path / f"t{suffix}"
    write = {".npy": lambda x: np.save(path, x), ".bin": lambda x: x.tofile(path)}
    rest = {"bin_dtype": dtype, "vocab_size": 9, **named}
    tokens = np.array([1, 0, 3, 7, 5, 6], dtype)
    write[suffix](tokens)
    (batch,) = batches([str(path)], **rest)
    assert batch["tokens"].tolist() == [tokens.tolist()]
    tokens[3] = WRAPS[dtype]
    write[suffix](tokens)
    with pytest.raises(
        ValueError, match=rf"t\{suffix} has the token {tokens[3]} .* 3,"
    ):
        list(batches([str(path)], **rest))


def test_a_pickled_numpy_file_is_refused_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([1, "a", None], object))
    with pytest.raises(ValueError, match=r"t\.npy is no NumPy file of integers"):
        batches([str(tmp_path / "t.npy")])
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY\x01")
    with pytest.raises(ValueError, match=r"t\.npy is no NumPy file of integers"):
        batches([str(tmp_path / "t.npy")])


@pytest.mark.parametrize(("token", "vocab_size"), [(700, 700), (-1, 701)])
def test_a_token_that_the_model_lacks_is_refused(
    token: int, vocab_size: int, tmp_path: Path
) -> None:
    named = {"batch_size": 1, "sequence_length": 5, "num_epochs": 1}
    named |= {"bin_dtype": "int16"}
    paths = [str(tmp_path / "t.bin")]
    np.array([1, 0, 3, 700, 5, 6], np.int16).tofile(tmp_path / "t.bin")
    (batch,) = batches(paths, vocab_size=701, **named)
    assert batch["tokens"].tolist() == [[1, 0, 3, 700, 5, 6]]
    np.array([1, 0, 3, token, 5, 6], np.int16).tofile(tmp_path / "t.bin")
    with pytest.raises(ValueError, match=f"token {token}, .*vocab_size is"):
        list(batches(paths, vocab_size=vocab_size, **named))


def test_equal_data_has_equal_hashes_wherever_it_is(tmp_path: Path) -> None:
    long = np.random.default_rng(0).integers(0, 99, 300_000).astype(np.uint8)
    hashes = []
    for name, change in (("a", None), ("b", None), ("c", 0), ("d", 299_999)):
        text = long.copy()
        if change is not None:
            text[change] += 1
        (tmp_path / name).write_bytes(text.tobytes())
        hashes.append(tokens_hash(read_tokens([str(tmp_path / name)])))
    assert hashes[0] == hashes[1]
    assert len({*hashes[1:]}) == 3


def test_data_is_not_read_into_memory(tmp_path: Path) -> None:
    """A sparse file of 1 TB, larger than any memory here, trains and resumes."""
    path = tmp_path / "tokens.bin"
    with path.open("wb") as stream:
        stream.truncate(10**12)
    iterator = batches([str(path)], sequence_length=1024)
    assert next(iterator)["tokens"].shape == (5, 1025)
    assert iterator.get_state() == {"next_index": 5}
