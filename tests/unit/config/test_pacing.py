"""Schedules of difficulties equal DeepSpeed's."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf.core.config import Config
from zinf.core.config.efficiency import KeptSchedule
from zinf.core.config.pacing import Pacing, buckets, round_down

# What scripts/reports/record_deepspeed_data.py recorded.
FIXTURES = Path(__file__).parents[1] / "data/deepspeed"
RECORD = json.loads((FIXTURES / "record.json").read_text())
LINEAR: dict[str, Any] = {
    "min_difficulty": 32,
    "max_difficulty": 256,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
}
repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=80)


@pytest.mark.parametrize("case", RECORD["schedules"], ids=lambda case: case["name"])
def test_the_difficulty_of_each_step_is_deepspeeds(case: Any) -> None:
    pacing = Pacing.model_validate(case["config"])
    expected = [value for value, count in case["values"] for _ in range(count)]
    assert [pacing(step) for step in range(1, len(expected) + 1)] == expected
    assert {*expected} <= {*pacing.levels()} and pacing.is_complete


@pytest.mark.parametrize("case", RECORD["kept"], ids=lambda case: case["name"])
def test_the_kept_tokens_of_each_step_are_deepspeeds(case: Any) -> None:
    schedule = KeptSchedule.model_validate(case["config"])
    expected = [value for value, count in case["values"] for _ in range(count)]
    assert [schedule.pacing(step) for step in range(len(expected))] == expected
    # What DeepSpeed counts: 4 rows, 10 of 12 layers drop tokens.
    highest = case["config"]["max_value"]
    assert case["layer_tokens"] == sum(4 * (10 * n + 2 * highest) for n in expected)


def test_tokens_are_counted_in_place_of_steps_where_a_schedule_says_so() -> None:
    config = {"total_curriculum_tokens": 1000, "difficulty_step": 8}
    pacing = Pacing.model_validate(LINEAR | {"schedule_config": config})
    assert pacing.counts_tokens and pacing.first_count == 0
    # 32 + 224 * tokens / 1000, rounded down to a multiple of 8.
    assert [pacing(n) for n in (0, 35, 36, 1000, 5000)] == [32, 32, 40, 256, 256]
    discrete = {"difficulty": [8, 16, 32], "max_tokens": [100, 200]}
    raw = {"schedule_type": "fixed_discrete", "schedule_config": discrete}
    pacing = Pacing.model_validate(LINEAR | raw)
    assert [pacing(n) for n in (0, 99, 100, 199, 200)] == [8, 8, 16, 16, 32]


def halves(step: int) -> int:
    return 16 * step


def test_a_custom_schedule_is_a_function_that_the_config_names() -> None:
    def custom(name: str) -> dict[str, Any]:
        config = {"function": f"{__name__}:{name}", "difficulty": [256, 64, 16]}
        return LINEAR | {"schedule_type": "custom", "schedule_config": config}

    raw = {"curriculum_learning": {"enabled": True, **custom("halves")}}
    lengths = Config.load(raw).lengths
    assert lengths is not None and lengths.buckets == (16, 64, 256)
    assert [lengths.pacing(step) for step in (1, 4, 99)] == [16, 64, 256]
    with pytest.raises(ValueError, match="absent' is not found"):
        Pacing.model_validate(custom("absent"))(1)


@repeatable
@given(st.integers(1, 40), st.integers(0, 99), st.integers(1, 9), st.integers(1, 50))
def test_levels_are_all_lengths_that_occur(low: int, more: int, step: int, total: int):
    config = {"total_curriculum_step": total, "difficulty_step": step}
    ends = {"min_difficulty": low, "max_difficulty": low + more}
    pacing = Pacing.model_validate(LINEAR | ends | {"schedule_config": config})
    occurring = {pacing(count) for count in range(1, total + 2)}
    levels = pacing.levels()
    assert occurring <= {*levels} and list(levels) == sorted({*levels})
    assert {levels[0], levels[-1]} == {pacing(1), low + more}
    assert all(level % step == 0 for level in levels[:-1])
    assert len(levels) <= (low + more - levels[0]) // step + 2


@repeatable
@given(st.lists(st.integers(1, 99), min_size=1, unique=True), st.integers(1, 12))
def test_buckets_are_spread_and_keep_both_ends(levels: list[int], most: int) -> None:
    levels = sorted(levels)
    found = buckets(levels, most)
    assert len(found) == min(most, len(levels)) and {*found} <= {*levels}
    assert found[-1] == levels[-1] and (most == 1 or found[0] == levels[0])
    places = [levels.index(level) for level in found]
    gaps = {b - a for a, b in zip(places, places[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    for value in range(levels[0] - 1, levels[-1] + 2):
        below = [level for level in found if level <= value]
        assert round_down(value, found) == (below[-1] if below else found[0])


def test_buckets_are_those_of_equal_stretches() -> None:
    assert buckets(range(1, 101), 4) == (1, 34, 67, 100)
    assert buckets([64, 96, 128, 160, 192, 224, 256], 3) == (64, 160, 256)
