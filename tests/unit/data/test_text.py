"""Promises of `zinf.data.text`, on a few hundred bytes and on the standard library."""

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zinf.data import read_tokens, text_dataset
from zinf.data.text import TokenWindows, tokens_hash
from zinf.prepare.batch import batch_spec, by_microbatch

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
        "batch_size": 4,
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


def test_batches_are_int32_windows_of_the_text(numbers: list[str]) -> None:
    batch = next(batches(numbers))["tokens"]
    assert (batch.shape, batch.dtype) == ((4, WINDOW + 1), np.int32)
    for row in batch:
        assert bytes(row.astype(np.uint8)) in NUMBERS + b"\0"


def test_an_epoch_holds_every_window_once_and_the_next_another_order(
    numbers: list[str],
) -> None:
    # 200 bytes and a separator: 200 / 4 = 50 windows, 10 batches of 5.
    first, second = (
        np.reshape(rows, (50, WINDOW + 1)).tolist()
        for rows in np.split(np.array(taken(batches(numbers, batch_size=5), 20)), 2)
    )
    assert first != second
    assert sorted(first) == sorted(second)
    assert len({tuple(row) for row in first}) == 50


def test_num_epochs_ends_the_batches(numbers: list[str]) -> None:
    assert len(list(batches(numbers, batch_size=5, num_epochs=2))) == 20


def test_equal_seeds_give_equal_batches_and_others_do_not(numbers: list[str]) -> None:
    first, again, other = (taken(batches(numbers, seed=seed), 30) for seed in (3, 3, 4))
    assert first == again != other


def test_a_restored_state_continues_with_the_same_batches(numbers: list[str]) -> None:
    iterator = batches(numbers)
    taken(iterator, 17)  # into the second epoch of 12 batches
    state = json.dumps(iterator.get_state())
    expected = taken(iterator, 20)
    resumed = batches(numbers)
    resumed.set_state(json.loads(state))
    assert taken(resumed, 20) == expected
    # Back in time too, after batches were taken.
    iterator.set_state(json.loads(state))
    assert taken(iterator, 20) == expected


def test_splits_share_no_byte_and_leave_none_out(numbers: list[str]) -> None:
    seen = {
        split: {
            token
            for batch in batches(
                numbers,
                split=split,
                validation_fraction=0.25,
                num_epochs=1,
                batch_size=1,
            )
            for token in batch["tokens"].ravel().tolist()
        }
        for split in ("train", "validation")
    }
    # Of 201 bytes the last 50 are held out: 151.. and the separator. What fills no
    # window at the end of a split, at most 3 tokens, is left out.
    assert seen["train"] <= set(range(1, 152))
    assert seen["validation"] <= {*range(152, 201), 0}
    assert len(seen["train"]) >= 151 - 3
    assert len(seen["validation"]) >= 50 - 3


def test_no_thread_or_process_is_started(numbers: list[str]) -> None:
    before = threading.active_count()
    taken(batches(numbers), 5)
    assert threading.active_count() == before


def test_too_little_text_for_a_batch_is_refused_with_the_sizes(
    numbers: list[str],
) -> None:
    with pytest.raises(ValueError, match="201 tokens, which is 50 windows .* is 51"):
        batches(numbers, batch_size=51)
    with pytest.raises(ValueError, match="validation split has 0 tokens.*raise valid"):
        batches(numbers, split="validation")


def test_impossible_settings_are_named(numbers: list[str]) -> None:
    with pytest.raises(ValueError, match="split is 'test'"):
        batches(numbers, split="test")
    with pytest.raises(ValueError, match=r"validation_fraction is 1.0"):
        batches(numbers, validation_fraction=1.0)


def microbatches_of(batch: dict[str, np.ndarray], count: int) -> list[list[Any]]:
    """The rows of each microbatch, as a step cuts a batch or a share of one."""
    cut = by_microbatch(batch, batch_spec(batch, count), count)
    return cut["tokens"].tolist()


def joined_microbatches(
    shares: list[Iterator[dict[str, np.ndarray]]], count: int
) -> list[list[list[Any]]]:
    """Of each batch, each microbatch of all processes together, in process order."""
    cut = [[microbatches_of(batch, count) for batch in share] for share in shares]
    return [
        [sum(parts, []) for parts in zip(*of_processes, strict=True)]
        for of_processes in zip(*cut, strict=True)
    ]


@pytest.mark.parametrize(("count", "num_microbatches"), [(2, 1), (2, 4), (4, 2)])
def test_microbatches_of_all_processes_together_are_those_of_one(
    numbers: list[str], count: int, num_microbatches: int
) -> None:
    size = {"batch_size": 8, "num_epochs": 3}
    named = {**size, "num_microbatches": num_microbatches}
    shares = [batches(numbers, process=(i, count), **named) for i in range(count)]
    joined = joined_microbatches(shares, num_microbatches)
    num_windows = len(NUMBERS) // WINDOW  # with the byte that closes the file
    assert len(joined) == 3 * num_windows // 8
    assert joined == joined_microbatches([batches(numbers, **size)], num_microbatches)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_a_position_means_the_same_to_any_number_of_processes(
    numbers: list[str], before: int, after: int
) -> None:
    named = {"batch_size": 8, "num_microbatches": 2}
    states = []
    for index in range(before):
        iterator = batches(numbers, process=(index, before), **named)
        taken(iterator, 17)
        states.append(iterator.get_state())
    assert all(state == states[0] for state in states)
    shares = []
    for index in range(after):
        iterator = batches(numbers, process=(index, after), **named)
        iterator.set_state(json.loads(json.dumps(states[0])))
        shares.append(islice(iterator, 23))
    whole = islice(batches(numbers, batch_size=8), 17, 17 + 23)
    assert joined_microbatches(shares, 2) == joined_microbatches([whole], 2)


@pytest.mark.parametrize(("count", "num_microbatches"), [(3, 1), (2, 4), (1, 3)])
def test_a_batch_that_does_not_divide_is_refused(
    numbers: list[str], count: int, num_microbatches: int
) -> None:
    found = f"4 samples .* {num_microbatches} micro.* {count} proc.*multiple of "
    with pytest.raises(ValueError, match=f"{found}{count * num_microbatches}"):
        batches(numbers, process=(0, count), num_microbatches=num_microbatches)


def test_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    np.array([1, 2, 3, 700, 5, 6], np.uint16).tofile(tmp_path / "t.bin")
    paths = [str(tmp_path / "t.bin")]
    named = {"batch_size": 1, "sequence_length": 5, "num_epochs": 1}
    (batch,) = batches(paths, vocab_size=701, **named)
    assert batch["tokens"].tolist() == [[1, 2, 3, 700, 5, 6]]
    with pytest.raises(ValueError, match="token 700, .* model.vocab_size is 700"):
        list(batches(paths, vocab_size=700, **named))


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
    assert next(iterator)["tokens"].shape == (4, 1025)
    assert iterator.get_state() == {"next_index": 4}
