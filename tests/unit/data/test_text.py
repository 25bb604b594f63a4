"""Promises of `zinf.data.text`, on a few hundred bytes and on the standard library."""

import json
import sysconfig
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zinf.data import find_files, text_dataset
from zinf.data.text import TokenWindows, read_bytes
from zinf.executor.batch import batch_spec, microbatches

WINDOW = 4  # sequence_length of the datasets below
NUMBERS = bytes(range(1, 201))  # each byte once: a token tells its place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bb")
    (tmp_path / "a.txt").write_bytes(b"a")
    (tmp_path / "inner" / "c.txt").write_bytes(b"ccc")
    (tmp_path / "d.bin").write_bytes(b"dddd")
    return tmp_path


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


def test_a_folder_is_searched_to_any_depth_in_a_fixed_order(folder: Path) -> None:
    names = [file.name for file in find_files([str(folder)], "*.txt")]
    assert names == ["a.txt", "b.txt", "c.txt"]


def test_paths_keep_their_order_and_no_file_is_read_twice(folder: Path) -> None:
    paths = [str(folder / "d.bin"), str(folder), str(folder / "a.txt")]
    names = [file.name for file in find_files(paths, "*.txt")]
    assert names == ["d.bin", "a.txt", "b.txt", "c.txt"]


def test_stdlib_is_source_text_without_packages_or_tests() -> None:
    files = find_files(["stdlib"], "*.py")
    assert {"argparse.py", "typing.py"} < {file.name for file in files}
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {part for file in files for part in file.relative_to(root).parts}
    assert not parts & {"site-packages", "test"}
    # Enough for the quickstart: on 3.11 to 3.13 it is about 12 MB.
    assert len(read_bytes(files)) > 5e6


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file or folder '.*/absent'"):
        find_files([str(tmp_path / "absent")], "*")


def test_a_glob_without_matches_is_refused_with_its_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"'{folder}' matches '\*\.rst'"):
        find_files([str(folder)], "*.rst")
    with pytest.raises(ValueError, match="No paths"):
        find_files([], "*")


def test_files_are_joined_with_a_zero_byte_after_each(folder: Path) -> None:
    files = find_files([str(folder)], "*.txt")
    assert read_bytes(files).tobytes() == b"a\0bb\0ccc\0"


@pytest.mark.parametrize("max_bytes", [1, 2, 4, 9, 100])
def test_no_more_than_max_bytes_are_read(folder: Path, max_bytes: int) -> None:
    text = read_bytes(find_files([str(folder)], "*.txt"), max_bytes=max_bytes)
    assert text.tobytes() == b"a\0bb\0ccc\0"[:max_bytes]


@pytest.mark.parametrize("num_tokens", [0, 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
def test_windows_predict_each_token_once(num_tokens: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint8)
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
    with pytest.raises(ValueError, match="201 bytes, which is 50 windows .* is 51"):
        batches(numbers, batch_size=51)
    with pytest.raises(ValueError, match="validation split has 0 bytes.*raise valid"):
        batches(numbers, split="validation")


def test_impossible_settings_are_named(numbers: list[str]) -> None:
    with pytest.raises(ValueError, match="split is 'test'"):
        batches(numbers, split="test")
    with pytest.raises(ValueError, match=r"validation_fraction is 1.0"):
        batches(numbers, validation_fraction=1.0)


def microbatches_of(batch: dict[str, np.ndarray], count: int) -> list[list[Any]]:
    """The rows of each microbatch, as a step cuts a batch or a share of one."""
    cut = microbatches(batch, batch_spec(batch, count), count)
    return [part["batch/tokens"].tolist() for part in cut]


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
