"""Each step draws the samples that DeepSpeed's would, and a run resumes anywhere."""

import json
import shutil
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from zinf.config import Config, ConfigError
from zinf.config.efficiency import Metric as MetricConfig
from zinf.data import CurriculumSamples, DifficultyIndex, Metric, Share
from zinf.data.index_file import read_rows, write_rows

# What scripts/reports/record_deepspeed_data.py recorded.
FIXTURES = Path(__file__).parent / "deepspeed"
RECORD = json.loads((FIXTURES / "record.json").read_text())
NUM_SAMPLES = len(RECORD["metrics"]["length"])
BATCH = 8


def source(count: int = NUM_SAMPLES) -> grain.MapDataset:
    return grain.MapDataset.source([{"id": np.int32(i)} for i in range(count)])


def metrics(case: dict[str, Any], folder: Path = FIXTURES) -> list[Metric]:
    found = []
    for name, raw in case["metrics"].items():
        config = MetricConfig.model_validate(raw)
        if not config.draws:
            continue
        assert config.index_to_sample_path and config.index_to_metric_path
        index = DifficultyIndex.read(
            folder / config.index_to_sample_path,
            folder / config.index_to_metric_path,
            num_samples=NUM_SAMPLES,
        )
        highest = config.max_difficulty
        assert highest is not None
        found.append(Metric(name, config, index, config.difficulty_type, highest))
    return found


def curriculum(case: dict[str, Any], **named: Any) -> CurriculumSamples:
    named = {"batch_size": BATCH, "seed": 5} | named
    return CurriculumSamples(source(), metrics(case), **named)


def steps_of(case: dict[str, Any]) -> list[set[int]]:
    """The eligible samples of each step."""
    found: list[set[int]] = []
    for added, count in case["eligible"]:
        now = {*added} | (found[-1] if found else set())
        found += [now] * count
    return found


cases = pytest.mark.parametrize("case", RECORD["samplers"], ids=lambda c: c["name"])


@cases
def test_the_eligible_samples_of_each_step_are_deepspeeds(case):
    samples = curriculum(case)
    for step, expected in enumerate(steps_of(case)):
        assert {*samples.eligible(step).tolist()} == expected, step


@cases
def test_a_step_draws_eligible_samples_alone_and_none_twice_before_the_others(case):
    samples = curriculum(case)
    for step, expected in enumerate(steps_of(case)):
        places = range(step * BATCH, (step + 1) * BATCH)
        drawn = [int(samples[place]["id"]) for place in places]
        assert {*drawn} <= expected
        # Places i to i + n - 1, for n eligible samples and i a multiple of n.
        size = len(expected)
        if places[0] // size == places[-1] // size:
            assert len({*drawn}) == BATCH


def test_when_all_are_eligible_each_epoch_has_each_sample_once_in_another_order():
    samples = curriculum(RECORD["samplers"][0])
    first = -(-24 * BATCH // NUM_SAMPLES) * NUM_SAMPLES
    epochs = [
        [
            int(samples[first + epoch * NUM_SAMPLES + i]["id"])
            for i in range(NUM_SAMPLES)
        ]
        for epoch in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(NUM_SAMPLES))
    assert epochs[0] != epochs[1]


def test_the_seed_decides_the_order_and_epochs_the_length():
    case = RECORD["samplers"][0]
    drawn = [
        [int(curriculum(case, seed=seed)[i]["id"]) for i in range(32)]
        for seed in (1, 2)
    ]
    assert drawn[0] != drawn[1]
    assert len(curriculum(case, num_epochs=3)) == 3 * NUM_SAMPLES


def test_a_run_resumes_at_any_step_on_any_number_of_processes():
    case = RECORD["samplers"][2]

    def readers(count: int) -> list[Any]:
        return [
            iter(Share(curriculum(case), BATCH, process=(i, count), num_microbatches=2))
            for i in range(count)
        ]

    (one,) = readers(1)
    undisturbed = [next(one)["id"] for _ in range(24)]
    for stop, before, after in ((0, 1, 2), (3, 2, 4), (7, 4, 1), (18, 1, 2)):
        first = readers(before)
        for reader in first:
            for _ in range(stop):
                next(reader)
        state = json.loads(json.dumps(first[-1].get_state()))
        rest = readers(after)
        for reader in rest:
            reader.set_state(state)
        for expected in undisturbed[stop:]:
            cut = [np.split(next(reader)["id"], 2) for reader in rest]
            found = np.concatenate([c[m] for m in range(2) for c in cut])
            assert (found == expected).all()


def test_the_files_of_deepspeeds_analyzer_are_read_and_written_alike(tmp_path):
    for name, values in RECORD["metrics"].items():
        read = read_rows(FIXTURES / f"{name}_sample_to_metric")
        assert read.flat.tolist() == values
        assert [row.tolist() for row in (read[0], read[7])] == [
            [values[0]],
            [values[7]],
        ]
    for path in FIXTURES.glob("*.idx"):
        rows = read_rows(path.with_suffix(""))
        sizes = np.diff(rows.ends, prepend=0)
        write_rows(tmp_path / path.stem, np.asarray(rows.flat), sizes)
        made = tmp_path / path.name
        content = [p.with_suffix(".bin").read_bytes() for p in (made, path)]
        assert content[0] == content[1]
        # Up to the number of rows, then their sizes and starts. Documents differ: the
        # analyzer's threads are some.
        for part in (slice(0, 26), slice(34, 34 + 12 * len(rows))):
            assert made.read_bytes()[part] == path.read_bytes()[part]


def test_an_index_of_other_data_is_refused():
    with pytest.raises(ValueError, match="index of 260 samples, and the data has 261"):
        DifficultyIndex.read(
            FIXTURES / "length_index_to_sample", None, num_samples=NUM_SAMPLES + 1
        )


def test_indexes_of_different_analyses_are_refused():
    with pytest.raises(ValueError, match="They are of different analyses"):
        DifficultyIndex.read(
            FIXTURES / "length_index_to_sample",
            FIXTURES / "rarity_index_to_metric",
            num_samples=NUM_SAMPLES,
        )


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda content: b"x" + content, "is no index file"),
        (".idx", lambda content: content[:60], "is cut off"),
        (".bin", lambda content: content[:-1], "bytes, but .* is about 260 entries"),
        (
            ".idx",
            lambda content: content[:17] + b"\x09" + content[18:],
            "dtype code 9",
        ),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, suffix, change, message):
    name = "length_index_to_sample"
    for path in FIXTURES.glob(f"{name}.*"):
        shutil.copy(path, tmp_path)
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name)


def test_a_difficulty_that_no_sample_has_is_refused():
    (metric,) = metrics(RECORD["samplers"][0])
    none = Metric("length", lambda step: 3, metric.index)
    samples = CurriculumSamples(source(), [none], batch_size=BATCH, seed=0)
    with pytest.raises(ValueError, match="none has length of at most 3"):
        samples[0]


def with_metric(**changed: Any) -> dict[str, Any]:
    metric = {**RECORD["samplers"][0]["metrics"]["length"], **changed}
    curriculum = {"enabled": True, "curriculum_metrics": {"length": metric}}
    sampling = {"enabled": True, "curriculum_learning": curriculum}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}}


def test_metrics_are_read_as_deepspeed_spells_them():
    efficiency = Config.load(with_metric()).data_efficiency
    assert efficiency is not None and list(efficiency.metrics) == ["length"]
    assert efficiency.lengths is None
    single = Config.load(with_metric(clustering_type="single_cluster")).data_efficiency
    assert single is not None and single.metrics == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"index_to_sample_path": None}, "length.index_to_sample_path: is missing"),
        ({"index_to_metric_path": None}, "length.index_to_metric_path: is missing"),
        ({"difficulty_type": "share"}, "difficulty_type"),
        ({"clustering_type": "many"}, "clustering_type"),
        (
            {"schedule_config": {"total_curriculum_tokens": 9, "difficulty_step": 1}},
            "drawn by the step",
        ),
    ],
)
def test_a_wrong_metric_is_refused_by_name(changed, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(with_metric(**changed))
