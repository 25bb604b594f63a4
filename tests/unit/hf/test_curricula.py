"""Samples of models of `transformers` that get longer, and easy ones first."""

import json
from itertools import islice

import numpy as np
import pytest

pytest.importorskip("torchax", reason="needs torch and more: pip install '.[hf]'")

from typer.testing import CliRunner

from tests.unit.hf.test_dropping import TOKENS, config_of, trained
from zinf import hf
from zinf.cli.app import app
from zinf.cli.problem import dataset
from zinf.config import Config
from zinf.data import Paced

LENGTHS = {
    "min_difficulty": 4,
    "max_difficulty": TOKENS,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4},
}
# 4 + 8 * step / 6 for the steps from 1 on, rounded down to a multiple of 4.
EXPECTED = [4, 4, 8, 8, 8, 12, 12, 12, 12]


def sampling(**metrics):
    curriculum = {"enabled": True, "curriculum_metrics": metrics}
    return {"enabled": True, "curriculum_learning": curriculum}


def taken(raw, count=9):
    return list(islice(dataset(Config.load(raw), "train"), count))


def keys(raw):
    packed = ["position_ids", "segment_ids"] * raw["data"].get("packing", False)
    return sorted(["input_ids", "labels", *packed])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("how", ["legacy", "seqlen_truncate", "seqlen_reshape"])
def test_rows_have_the_length_of_the_step(how, packing, tmp_path):
    raw = config_of(tmp_path)
    raw["data"]["packing"] = packing
    whole = taken(raw)
    if how == "legacy":
        raw["curriculum_learning"] = {
            "enabled": True,
            "curriculum_type": "seqlen",
            **LENGTHS,
        }
    else:
        raw["data_efficiency"]["data_sampling"] = sampling(**{how: LENGTHS})
    data = dataset(Config.load(raw), "train")
    assert isinstance(data, Paced)
    for length, batch, longest in zip(EXPECTED, islice(data, 9), whole, strict=True):
        assert sorted(batch) == keys(raw)
        for name, array in longest.items():
            pieces = TOKENS // length if how == "seqlen_reshape" else 1
            cut = array[:, : pieces * length].reshape(-1, length)
            np.testing.assert_array_equal(batch[name], cut)


@pytest.mark.slow
def test_a_run_gets_longer_rows_as_it_goes_on(tmp_path):
    raw = config_of(tmp_path, sampling=sampling(seqlen_reshape=LENGTHS))
    raw["data"]["packing"] = True
    metrics, _ = trained(tmp_path, raw)
    assert [line["sequence_length"] for line in metrics] == EXPECTED
    counts = [int((b["labels"][:, 1:] >= 0).sum()) for b in taken(raw)]
    assert [line["tokens_seen"] for line in metrics] == np.cumsum(counts).tolist()
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_a_microbatch_without_a_token_to_train_on_is_refused(tmp_path):
    raw = config_of(tmp_path, sampling=sampling(seqlen_truncate=LENGTHS))
    lines = [{"prompt": "w1 w2 w3 w4 w5 ", "completion": "w6"}] * 8
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match="first 4 tokens .* none is trained on"):
        taken(raw)
    raw["data"]["completion_only"] = False
    assert len(taken(raw)) == 9


def analyzed(tmp_path, raw, *named):
    data = raw["data"]
    options = {
        "--model": raw["model"]["huggingface"],
        "--sequence-length": data["sequence_length"],
        "--validation-fraction": data["validation_fraction"],
        "--output": tmp_path / "difficulty",
    }
    given = [str(x) for option in options.items() for x in option]
    command = ["data", "analyze", *data["paths"], *given, *named]
    return CliRunner().invoke(app, command)


@pytest.mark.parametrize("packing", [False, True])
def test_easy_samples_come_first_by_metrics_of_the_tokens(packing, tmp_path):
    raw = config_of(tmp_path)
    raw["data"]["packing"] = packing
    named = ["--metric", "sequence_length", "--metric", "vocabulary_rarity"]
    ran = analyzed(tmp_path, raw, *named, *["--packing"] * packing)
    assert ran.exit_code == 0, ran.output
    everything = hf.Task(Config.load(raw)).rows()
    ascending = sorted(everything.num_tokens(i) for i in range(len(everything)))
    prefix = tmp_path / "difficulty/sequence_length"
    metric = {
        "index_to_sample_path": f"{prefix}_index_to_sample",
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        **LENGTHS,
    }
    raw["data_efficiency"]["data_sampling"] = sampling(sequence_length=metric)
    raw["train_batch_size"] = 1
    found = taken(raw)
    for share, batch in zip(EXPECTED, found, strict=True):
        is_token = batch["segment_ids"] > 0 if packing else batch["labels"] >= 0
        eligible = len(ascending) // TOKENS * share
        if share == TOKENS:
            eligible = len(ascending)
        assert is_token.sum() <= ascending[eligible - 1]
    again = iter(dataset(Config.load(raw), "train"))
    for _ in range(4):
        next(again)
    rest = iter(dataset(Config.load(raw), "train"))
    rest.set_state(json.loads(json.dumps(again.get_state())))
    np.testing.assert_array_equal(next(rest)["input_ids"], found[4]["input_ids"])


def test_an_index_of_other_samples_is_refused(tmp_path):
    raw = config_of(tmp_path)
    assert analyzed(tmp_path, raw, "--metric", "vocabulary_rarity").exit_code == 0
    prefix = tmp_path / "difficulty/vocabulary_rarity"
    metric = {
        "index_to_sample_path": f"{prefix}_index_to_sample",
        "difficulty_type": "percentile",
        **LENGTHS,
    }
    raw["data_efficiency"]["data_sampling"] = sampling(rarity=metric)
    taken(raw, 1)
    path = tmp_path / "data.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(reversed(lines)))
    with pytest.raises(ValueError, match="has an analysis of other data: tokens is"):
        taken(raw, 1)
    raw["data"]["packing"] = True
    with pytest.raises(ValueError, match="is an index of 24 samples"):
        taken(raw, 1)
