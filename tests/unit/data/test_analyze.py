"""Difficulties are computed once, and an analysis that was stopped goes on."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import run
from zinf.cli.task import task_of
from zinf.core.config import Config
from zinf.data import Analysis, DifficultyIndex, analyze
from zinf.data.analyze import CHUNK_SAMPLES, token_counts, total, vocabulary_rarity
from zinf.data.index_file import read_rows

NUM_SAMPLES = CHUNK_SAMPLES * 2 + 37


class Samples:
    """Samples of 8 tokens, all of whose first tokens are their number modulo 50."""

    def __init__(self, count: int = NUM_SAMPLES) -> None:
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.read += 1
        tokens = np.zeros(8, np.int32)
        tokens[: index % 8 + 1] = index % 50
        return {"tokens": tokens}


def analysis(folder: Path, samples: Any = None, **about: Any) -> Analysis:
    return Analysis(Samples() if samples is None else samples, about, folder)


def first(tokens: np.ndarray) -> np.ndarray:
    return 2 * tokens[:, 0] - 30


def test_an_index_has_all_samples_by_difficulty_and_in_order(tmp_path):
    analyze(analysis(tmp_path), [f"{__name__}:first", "sequence_length"])
    expected = 2 * (np.arange(NUM_SAMPLES) % 50) - 30
    index = DifficultyIndex.read(
        tmp_path / "first_index_to_sample",
        tmp_path / "first_index_to_metric",
        num_samples=NUM_SAMPLES,
    )
    assert index.values is not None and index.values.tolist() == list(range(-30, 70, 2))
    assert (index.samples == np.argsort(expected, kind="stable")).all()
    for limit in (-31, -30, 0, 1, 68):
        assert index.num_up_to(limit) == np.count_nonzero(expected <= limit)
    stored = read_rows(tmp_path / "first_sample_to_metric")
    assert (stored.flat == expected).all() and len(stored) == NUM_SAMPLES
    lengths = read_rows(tmp_path / "sequence_length_sample_to_metric").flat
    numbers = np.arange(NUM_SAMPLES)
    assert (lengths == np.where(numbers % 50, numbers % 8 + 1, 0)).all()


def test_rare_tokens_are_difficult():
    counts = np.array([90, 9, 1])
    tokens = np.array([[0, 0], [1, 1], [0, 2]])
    # -100 log(0.9), -100 log(0.09), and the mean of -100 log(0.9) and -100 log(0.01).
    assert vocabulary_rarity(tokens, counts).tolist() == [11, 241, 236]
    # Padding is no token: neither in a sample nor in the counts.
    padded = np.array([[0, -1], [1, -1]])
    assert vocabulary_rarity(padded, counts).tolist() == [11, 241]
    assert token_counts(padded).tolist() == [1, 1]


def one_longer(tokens: np.ndarray) -> np.ndarray:
    """Arrays of chunks differ in length."""
    return np.ones(3 if len(tokens) == CHUNK_SAMPLES else 5, int)


def test_totals_are_those_of_all_samples(tmp_path):
    whole = np.stack([Samples()[i]["tokens"] for i in range(NUM_SAMPLES)])
    counts = total(analysis(tmp_path), "token_counts")
    assert (counts == np.bincount(whole.ravel())).all()
    assert not (tmp_path / "token_counts.partial.npz").exists()
    # Of three chunks, the last alone gives five numbers.
    found = total(analysis(tmp_path), f"{__name__}:one_longer")
    assert found.tolist() == [3, 3, 3, 1, 1]


class Stopped(Exception):
    """As if the process was killed."""


@pytest.mark.parametrize("name", [f"{__name__}:first", "vocabulary_rarity"])
def test_a_stopped_analysis_goes_on_and_gives_the_same_files(tmp_path, name):
    short = name.rpartition(":")[2]
    analyze(analysis(tmp_path / "whole"), [name])
    stops, samples = 0, Samples()

    def say(text: str) -> None:
        if not text.endswith("done before"):
            raise Stopped

    while True:
        try:
            analyze(analysis(tmp_path / "parts", samples), [name], say)
            break
        except Stopped:
            stops += 1
            # A chunk that was half written when the process was killed.
            path = tmp_path / "parts" / f"{short}.values"
            if path.exists():
                with path.open("ab") as stream:
                    stream.write(b"half")
    # 3 chunks, of the counts too for the rarity.
    assert stops == (6 if name == "vocabulary_rarity" else 3)
    assert samples.read == NUM_SAMPLES * stops // 3
    kinds = ("sample_to_metric", "index_to_sample", "index_to_metric")
    for file in [f"{short}_{kind}.{s}" for kind in kinds for s in ("bin", "idx")]:
        both = [
            (tmp_path / folder / file).read_bytes() for folder in ("whole", "parts")
        ]
        assert both[0] == both[1], file


@pytest.mark.slow
def test_several_processes_give_the_same_files(tmp_path):
    for processes in (1, 2):
        made = Analysis(Samples(), {}, tmp_path / str(processes), processes)
        analyze(made, ["vocabulary_rarity"])
    name = "vocabulary_rarity_index_to_sample.bin"
    both = [(tmp_path / folder / name).read_bytes() for folder in ("1", "2")]
    assert both[0] == both[1]


def nan_of_one(tokens: np.ndarray) -> np.ndarray:
    values = np.zeros(len(tokens))
    values[5] = np.nan
    return values


def halves(tokens: np.ndarray) -> np.ndarray:
    return np.arange(len(tokens)) / 2


def one_for_all(tokens: np.ndarray) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:nan_of_one", "is nan for sample 5. Difficulties are integers"),
        (f"{__name__}:halves", "is 0.5 for sample 1"),
        (f"{__name__}:one_for_all", "must return a number for each"),
        (f"{__name__}:absent", "is not found"),
        ("rarity", "There is no metric 'rarity'"),
    ],
)
def test_a_metric_without_an_integer_for_each_sample_is_refused(
    tmp_path, name, message
):
    with pytest.raises(ValueError, match=message):
        analyze(analysis(tmp_path), [name])


def test_an_analysis_of_other_data_is_not_continued(tmp_path):
    analyze(analysis(tmp_path, tokens="a"), [f"{__name__}:first"])
    with pytest.raises(ValueError, match="has an analysis of other data"):
        analyze(analysis(tmp_path, tokens="b"), [f"{__name__}:first"])
    with pytest.raises(ValueError, match="There is no sample"):
        analyze(analysis(tmp_path, Samples(0)), [f"{__name__}:first"])


def test_what_the_command_writes_is_what_a_run_draws_by(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"a" * 700 + bytes(range(32, 127)) * 7)
    named = "--sequence-length", 16, "--output", tmp_path / "out"
    run("data", "analyze", text, "--metric", "vocabulary_rarity", *named)
    prefix = tmp_path / "out/vocabulary_rarity"
    metric = {
        "index_to_sample_path": f"{prefix}_index_to_sample",
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 1,
        "max_difficulty": 10,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 1},
    }
    curriculum = {"enabled": True, "curriculum_metrics": {"rarity": metric}}
    sampling = {"enabled": True, "curriculum_learning": curriculum}
    raw = {
        "data_efficiency": {"enabled": True, "data_sampling": sampling},
        "model": {"num_layers": 1, "num_heads": 1, "embed_dim": 8, "max_length": 16},
        "data": {"paths": [str(text)], "sequence_length": 16},
        "train_batch_size": 4,
    }
    data = task_of(Config.load(raw)).dataset("train")
    batches = [batch["tokens"] for batch in islice(data, 2)]
    # The easiest are those of the letter that is more than half of the data.
    assert all((tokens == ord("a")).all() for tokens in batches)
    raw["data"]["sequence_length"] = 8
    with pytest.raises(ValueError, match="is an index of"):
        task_of(Config.load(raw)).dataset("train")
    about = json.loads((tmp_path / "out/about.json").read_text())
    assert about["sequence_length"] == 16
    # As many samples, of another text.
    raw["data"]["sequence_length"] = 16
    text.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(ValueError, match="an analysis of other data: tokens is"):
        task_of(Config.load(raw)).dataset("train")
