"""Each step draws the samples that DeepSpeed's would, from its index files or ours."""

import json
import shutil
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from zinf.core.config import Config, ConfigError
from zinf.core.config.efficiency import Metric as MetricConfig
from zinf.data import CurriculumSamples, DifficultyIndex, Metric
from zinf.data.index_file import fitting, read_rows, write_rows

# What scripts/reports/record_deepspeed_data.py recorded.
FIXTURES = Path(__file__).parent / "deepspeed"
RECORD = json.loads((FIXTURES / "record.json").read_text())
NUM_SAMPLES = len(RECORD["metrics"]["length"])
BATCH = 8
SOURCE = grain.MapDataset.source([{"id": np.int32(i)} for i in range(NUM_SAMPLES)])


def read(name: str, values: str | None, *, num_samples: int = NUM_SAMPLES) -> Any:
    path = None if values is None else FIXTURES / values
    return DifficultyIndex.read(FIXTURES / name, path, num_samples=num_samples)


def metrics(case: dict[str, Any]) -> list[Metric]:
    found = []
    for name, raw in case["metrics"].items():
        config = MetricConfig.model_validate(raw)
        if not config.draws:
            continue
        assert config.index_to_sample_path and config.index_to_metric_path
        index = read(str(config.index_to_sample_path), str(config.index_to_metric_path))
        highest = config.max_difficulty
        assert highest is not None
        found.append(Metric(name, config, index, config.difficulty_type, highest))
    return found


def curriculum(case: dict[str, Any], **named: Any) -> CurriculumSamples:
    named = {"batch_size": BATCH, "seed": 5} | named
    return CurriculumSamples(SOURCE, metrics(case), **named)


def drawn(samples: CurriculumSamples, first: int, count: int) -> list[int]:
    return [int(samples[first + i]["id"]) for i in range(count)]


@pytest.mark.parametrize("case", RECORD["samplers"], ids=lambda c: c["name"])
def test_the_eligible_samples_of_each_step_are_deepspeeds(case):
    """A step draws from them alone, and none twice before the others."""
    samples, step = curriculum(case), 0
    expected: set[int] = set()
    for added, count in case["eligible"]:
        expected |= {*added}
        size = len(expected)
        for step in range(step, step + count):  # noqa: B020
            assert {*samples.eligible(step).tolist()} == expected, step
            places = drawn(samples, step * BATCH, BATCH)
            assert {*places} <= expected
            # Places i to i + n - 1, for n eligible samples and i a multiple of n.
            if step * BATCH // size == (step * BATCH + BATCH - 1) // size:
                assert len({*places}) == BATCH
        step += 1


def test_when_all_are_eligible_each_epoch_has_each_sample_once_in_another_order():
    samples = curriculum(RECORD["samplers"][0])
    first = -(-24 * BATCH // NUM_SAMPLES) * NUM_SAMPLES
    epochs = [drawn(samples, first + i * NUM_SAMPLES, NUM_SAMPLES) for i in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(NUM_SAMPLES))
    assert epochs[0] != epochs[1]


def test_the_seed_decides_the_order_and_epochs_the_length():
    case = RECORD["samplers"][0]
    orders = [drawn(curriculum(case, seed=seed), 0, 32) for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert len(curriculum(case, num_epochs=3)) == 3 * NUM_SAMPLES


def test_shares_are_rounded_as_deepspeeds_and_the_rest_comes_last():
    index = DifficultyIndex(FIXTURES, np.arange(25), None, np.zeros(0))
    # 25 samples are two for each of 10 parts.
    found = [index.num_of_share(percentile, 10) for percentile in (0, 1, 9, 10, 11)]
    assert found == [0, 2, 18, 25, 25]


def test_the_files_of_deepspeeds_analyzer_are_read_and_written_alike(tmp_path):
    for name, values in RECORD["metrics"].items():
        rows = read_rows(FIXTURES / f"{name}_sample_to_metric")
        assert rows.flat.tolist() == values
        assert [rows[i].tolist() for i in (0, 7)] == [[values[0]], [values[7]]]
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


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_entries_have_the_smallest_dtype_that_holds_them(bits):
    most, half = 2**bits - 1, 2 ** (bits - 1)
    assert fitting(0, most).itemsize == fitting(-half, half - 1).itemsize == bits // 8
    wider = (fitting(0, most + 1), fitting(-half - 1, 0), fitting(-1, half))
    assert {dtype.itemsize for dtype in wider} == {bits // 4}


def test_indexes_of_other_data_or_of_different_analyses_are_refused():
    with pytest.raises(ValueError, match="index of 260 samples, and the data has 261"):
        read("length_index_to_sample", None, num_samples=NUM_SAMPLES + 1)
    with pytest.raises(ValueError, match="They are of different analyses"):
        read("length_index_to_sample", "rarity_index_to_metric")


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda x: b"x" + x, "is no index file"),
        (".idx", lambda x: x[:60], "is cut off"),
        (".bin", lambda x: x[:-1], "bytes, but .* is about 260 entries"),
        (".idx", lambda x: x[:9] + b"\x02" + x[10:], "version 2"),
        (".idx", lambda x: x[:17] + b"\x00" + x[18:], "dtype code 0"),
        (".idx", lambda x: x[:17] + b"\x09" + x[18:], "dtype code 9"),
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


def test_difficulties_that_do_not_ascend_are_refused(tmp_path):
    write_rows(tmp_path / "samples", np.arange(4), np.array([2, 2]))
    write_rows(tmp_path / "values", np.array([3, 3]), np.array([1, 1]))
    with pytest.raises(ValueError, match="difficulties must ascend"):
        DifficultyIndex.read(tmp_path / "samples", tmp_path / "values", num_samples=4)


def test_a_difficulty_that_no_sample_has_is_refused():
    (metric,) = metrics(RECORD["samplers"][0])
    none = Metric("length", lambda step: 3, metric.index)
    samples = CurriculumSamples(SOURCE, [none], batch_size=BATCH, seed=0)
    with pytest.raises(ValueError, match="none has length of at most 3"):
        samples[0]


def with_metric(**changed: Any) -> Config:
    metric = {**RECORD["samplers"][0]["metrics"]["length"], **changed}
    curriculum = {"enabled": True, "curriculum_metrics": {"length": metric}}
    sampling = {"enabled": True, "curriculum_learning": curriculum}
    efficiency = {"enabled": True, "data_sampling": sampling}
    return Config.load({"data_efficiency": efficiency})


def test_metrics_are_read_as_deepspeed_spells_them():
    efficiency = with_metric().data_efficiency
    assert efficiency is not None and list(efficiency.metrics) == ["length"]
    assert efficiency.lengths is None
    single = with_metric(clustering_type="single_cluster").data_efficiency
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
        with_metric(**changed)
