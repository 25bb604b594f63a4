"""Samples of models of `transformers` by the data efficiency sections of a config."""

import json
from itertools import islice

import numpy as np
import pytest

from tests.command import run
from tests.unit.hf.models import TOKENS, llama, metrics_of, save, tokenizer, write
from zinf import hf
from zinf.cli.task import task_of
from zinf.core.config import Config
from zinf.data import Paced

LENGTHS = {
    "min_difficulty": 4,
    "max_difficulty": TOKENS,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4},
}
# 4 + 8 * step / 6 for the steps from 1 on, rounded down to a multiple of 4.
EXPECTED = [4, 4, 8, 8, 8, 12, 12, 12, 12]


@pytest.fixture
def raw(tmp_path):
    """The config of a run of 9 steps on 24 texts."""
    save(llama(), tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    draw = np.random.default_rng(0)
    lengths = [draw.integers(2, 11) for _ in range(24)]
    lines = [{"text": " ".join(f"w{i}" for i in range(n))} for n in lengths]
    return {
        "model": {"huggingface": str(tmp_path / "model")},
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "data": {
            "paths": [str(write(tmp_path / "data.jsonl", lines))],
            "sequence_length": TOKENS,
            "validation_fraction": 0.0,
            "max_buckets": 3,
            "packing": False,
        },
        "data_efficiency": {"enabled": True},
        "run": {"output": str(tmp_path / "run"), "steps": 9},
    }


def curriculum(raw, **metrics):
    found = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "curriculum_learning": found}
    raw["data_efficiency"]["data_sampling"] = sampling


def data_of(raw):
    return task_of(Config.load(raw)).dataset("train")


def taken(raw, count=9):
    return list(islice(data_of(raw), count))


def trained(raw, folder):
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    done = run("train", path)
    return metrics_of(folder / "run"), done.output


@pytest.mark.parametrize(
    ("how", "packing"),
    [("legacy", False), ("seqlen_truncate", True), ("seqlen_reshape", True)],
)
def test_rows_have_the_length_of_the_step(how, packing, raw):
    raw["data"]["packing"] = packing
    whole = taken(raw)
    if how == "legacy":
        section = {"enabled": True, "curriculum_type": "seqlen", **LENGTHS}
        raw["curriculum_learning"] = section
    else:
        curriculum(raw, **{how: LENGTHS})
    data = data_of(raw)
    assert isinstance(data, Paced)
    for length, batch, longest in zip(EXPECTED, islice(data, 9), whole, strict=True):
        assert batch.keys() == longest.keys()
        assert ("segment_ids" in batch) == ("position_ids" in batch) == packing
        for name, array in longest.items():
            pieces = TOKENS // length if how == "seqlen_reshape" else 1
            cut = array[:, : pieces * length].reshape(-1, length)
            np.testing.assert_array_equal(batch[name], cut)


@pytest.mark.slow
def test_a_run_gets_longer_rows_and_layers_drop_tokens(raw, tmp_path):
    curriculum(raw, seqlen_reshape=LENGTHS)
    raw["data"]["packing"] = True
    schedule = {
        "min_value": 4,
        "max_value": TOKENS,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 8, "seq_per_step": 4},
    }
    random_ltd = {"enabled": True, "random_ltd_layer_id": [1]}
    random_ltd["random_ltd_schedule"] = schedule
    routing = {"enabled": True, "random_ltd": random_ltd}
    raw["data_efficiency"]["data_routing"] = routing
    metrics, _ = trained(raw, tmp_path)
    assert [line["sequence_length"] for line in metrics] == EXPECTED
    # 4 + step, rounded down to a multiple of 4.
    kept = [line["kept_tokens"] for line in metrics]
    assert kept == [4, 4, 4, 4, 8, 8, 8, 8, 12]
    counts = [int((b["labels"][:, 1:] >= 0).sum()) for b in taken(raw)]
    assert [line["tokens_seen"] for line in metrics] == np.cumsum(counts).tolist()
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    random_ltd["random_ltd_layer_id"] = [2]
    with pytest.raises(ValueError, match="has 2, but the layers of"):
        data_of(raw)


@pytest.mark.slow
def test_batches_have_as_many_tokens_and_rates_to_match(raw, tmp_path):
    section = {"enabled": True, "max_tokens": 24, "lr_scaling_method": "sqrt"}
    sampling = {"enabled": True, "dynamic_batching": section}
    raw["data_efficiency"]["data_sampling"] = sampling
    metrics, output = trained(raw, tmp_path)
    batches = [batch["input_ids"] for batch in taken(raw)]
    assert len({batch.shape for batch in batches}) > 1
    for line, batch in zip(metrics, batches, strict=True):
        assert line["sequence_length"] == batch.shape[1] and batch.size <= 24
        expected = 1e-2 * (len(batch) / 4) ** 0.5
        assert abs(line["learning_rate"] - expected) < 1e-6 * expected
    assert "data: batches have " in output
    # Complete batches of two epochs of 24 samples; `num_batches` counts any share.
    count = hf.Task(Config.load(raw)).steps_of_epochs(4, 2.0, lambda text: None)
    drawn = [len(batch["input_ids"]) for batch in taken(raw, count)]
    assert sum(drawn) <= 48 < sum(drawn) + sum({len(batch) for batch in batches})


def test_a_microbatch_without_a_token_to_train_on_is_refused(raw, tmp_path):
    curriculum(raw, seqlen_truncate=LENGTHS)
    line = {"prompt": "w1 w2 w3 w4 w5 ", "completion": "w6"}
    write(tmp_path / "data.jsonl", [line] * 8)
    with pytest.raises(ValueError, match="first 4 tokens .* none is trained on"):
        taken(raw)
    raw["data"]["completion_only"] = False
    assert len(taken(raw)) == 9


def by_percentile(raw, folder, name, *options):
    """Analyzes the data, and has the easiest samples come first."""
    data = raw["data"]
    run(
        *("data", "analyze", *data["paths"], "--output", folder, *options),
        *("--model", raw["model"]["huggingface"], "--metric", name),
        *("--sequence-length", data["sequence_length"]),
        *("--validation-fraction", data["validation_fraction"]),
    )
    metric = {
        "index_to_sample_path": f"{folder / name}_index_to_sample",
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        **LENGTHS,
    }
    curriculum(raw, metric=metric)


@pytest.mark.parametrize("packing", [False, True])
def test_easy_samples_come_first_by_metrics_of_the_tokens(packing, raw, tmp_path):
    raw["data"]["packing"] = packing
    options = ["--packing"] * packing
    by_percentile(raw, tmp_path / "difficulty", "sequence_length", *options)
    everything = hf.Task(Config.load(raw)).rows()
    ascending = sorted(everything.num_tokens(i) for i in range(len(everything)))
    raw["train_batch_size"] = 1
    found = taken(raw)
    for share, batch in zip(EXPECTED, found, strict=True):
        is_token = batch["segment_ids"] > 0 if packing else batch["labels"] >= 0
        eligible = len(ascending) // TOKENS * share
        if share == TOKENS:
            eligible = len(ascending)
        assert is_token.sum() <= ascending[eligible - 1]
    again = iter(data_of(raw))
    for _ in range(4):
        next(again)
    rest = iter(data_of(raw))
    rest.set_state(json.loads(json.dumps(again.get_state())))
    np.testing.assert_array_equal(next(rest)["input_ids"], found[4]["input_ids"])


def test_an_index_of_other_samples_is_refused(raw, tmp_path):
    by_percentile(raw, tmp_path / "difficulty", "vocabulary_rarity")
    taken(raw, 1)
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(reversed(path.read_text().splitlines())))
    with pytest.raises(ValueError, match="has an analysis of other data: tokens is"):
        taken(raw, 1)
    raw["data"]["packing"] = True
    with pytest.raises(ValueError, match="is an index of 24 samples"):
        taken(raw, 1)
