"""Schedules of difficulties equal DeepSpeed's; wrong ones are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from zinf.config import Config, ConfigError, notices
from zinf.config.efficiency import KeptSchedule
from zinf.config.pacing import Pacing, buckets, round_down

# What scripts/reports/record_deepspeed_data.py recorded.
FIXTURES = Path(__file__).parents[1] / "data/deepspeed"
RECORD = json.loads((FIXTURES / "record.json").read_text())
LINEAR: dict[str, Any] = {
    "min_difficulty": 32,
    "max_difficulty": 256,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
}


def legacy(**changed: Any) -> dict[str, Any]:
    return {"curriculum_learning": {"enabled": True, **LINEAR, **changed}}


def nested(**changed: Any) -> dict[str, Any]:
    metrics = {"seqlen_reshape": {**LINEAR, **changed}}
    curriculum = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "curriculum_learning": curriculum}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}}


@pytest.mark.parametrize("case", RECORD["schedules"], ids=lambda case: case["name"])
def test_the_difficulty_of_each_step_is_deepspeeds(case):
    pacing = Pacing.model_validate(case["config"])
    expected = [value for value, count in case["values"] for _ in range(count)]
    assert [pacing(step) for step in range(1, len(expected) + 1)] == expected
    assert {*expected} <= {*pacing.levels()} and pacing.is_complete


@pytest.mark.parametrize("case", RECORD["kept"], ids=lambda case: case["name"])
def test_the_kept_tokens_of_each_step_are_deepspeeds(case):
    schedule = KeptSchedule.model_validate(case["config"])
    expected = [value for value, count in case["values"] for _ in range(count)]
    assert [schedule.pacing(step) for step in range(len(expected))] == expected
    # What DeepSpeed counts: 4 rows, 10 of 12 layers drop tokens.
    highest = case["config"]["max_value"]
    assert case["layer_tokens"] == sum(4 * (10 * n + 2 * highest) for n in expected)


def dropping(**changed: Any) -> dict[str, Any]:
    schedule = {
        "min_value": 32,
        "max_value": 256,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 100, "seq_per_step": 16},
    }
    random_ltd = {
        "enabled": True,
        "total_layer_num": 6,
        "random_ltd_layer_num": 4,
        "random_ltd_layer_id": [1, 2, 3, 4],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "seq_batch_dim",
        "random_ltd_schedule": schedule | changed.pop("schedule", {}),
        **changed,
    }
    routing = {"enabled": True, "random_ltd": random_ltd}
    return {
        "data_efficiency": {"enabled": True, "data_routing": routing},
        "model": {"num_layers": 6, "num_heads": 2, "embed_dim": 8, "max_length": 256},
    }


def test_random_ltd_is_read_as_deepspeed_spells_it():
    assert Config.load({}).kept_tokens is None
    config = Config.load(dropping(), ["data.max_buckets=4"])
    kept = config.kept_tokens
    assert kept is not None and kept.layers == (1, 2, 3, 4) and kept.seed == 1234
    # 15 numbers from 32 to 256, of which the first and the last stay.
    assert kept.buckets[0] == 32 and kept.buckets[-1] == 256 and len(kept.buckets) == 4
    assert "15 numbers of kept tokens are rounded down to 4" in notices(config)[0]
    off = Config.load(dropping(), ["data_efficiency.data_routing.enabled=false"])
    assert (
        off.kept_tokens is None and "data_routing.enabled is false" in notices(off)[0]
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"random_ltd_layer_id": [1, 2, 3, 6]}, r"has 6, but the layers are 0 to 5"),
        ({"random_ltd_layer_id": [2, 1]}, "must be ascending"),
        ({"random_ltd_layer_id": None}, "list the layers that drop tokens"),
        ({"random_ltd_layer_num": 3}, "has 4 layers, and random_ltd_layer_num is 3"),
        ({"total_layer_num": 12}, "total_layer_num: is 12, and model.num_layers is 6"),
        ({"model_type": "encoder"}, "model_type"),
        ({"schedule": {"max_value": 512}}, "512 kept tokens are more than data.seq"),
        ({"schedule": {"min_value": 300}}, "300 is above max_value, which is 256"),
        ({"schedule": {"min_value": 8}}, "8 is rounded down to 0 kept tokens"),
        ({"schedule": {"schedule_config": {}}}, "require_steps: is missing"),
        (
            {"layer_token_lr_schedule": {"enabled": True}},
            "layer_token_lr_schedule: not supported yet",
        ),
    ],
)
def test_a_wrong_dropping_is_refused_by_name(changed, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(dropping(**changed))


def test_layers_in_a_scan_cannot_drop_tokens():
    with pytest.raises(ConfigError, match="Set scan_layers to false"):
        Config.load(dropping(), ["model.scan_layers=true"])


def test_tokens_are_counted_in_place_of_steps_where_a_schedule_says_so():
    config = {"total_curriculum_tokens": 1000, "difficulty_step": 8}
    pacing = Pacing.model_validate(LINEAR | {"schedule_config": config})
    assert pacing.counts_tokens and pacing.first_count == 0
    # 32 + 224 * tokens / 1000, rounded down to a multiple of 8.
    assert [pacing(n) for n in (0, 35, 36, 1000, 5000)] == [32, 32, 40, 256, 256]
    discrete = {"difficulty": [8, 16, 32], "max_tokens": [100, 200]}
    given = {"schedule_type": "fixed_discrete", "schedule_config": discrete}
    pacing = Pacing.model_validate(LINEAR | given)
    assert [pacing(n) for n in (0, 99, 100, 199, 200)] == [8, 8, 16, 16, 32]


def halves(step: int) -> int:
    return 16 * step


def test_a_custom_schedule_is_a_function_that_the_config_names():
    config = {"function": f"{__name__}:halves", "difficulty": [16, 64, 256]}
    custom = {"schedule_type": "custom", "schedule_config": config}
    found = Config.load(legacy(**custom)).lengths
    assert found is not None
    assert [found.pacing(step) for step in (1, 4, 99)] == [16, 64, 256]
    assert found.buckets == (16, 64, 256)


def test_both_spellings_of_deepspeed_give_lengths():
    assert Config.load({}).lengths is None
    old, new = Config.load(legacy()).lengths, Config.load(nested()).lengths
    assert old is not None and new is not None
    assert (old.reshapes, new.reshapes) == (False, True)
    assert old.buckets == new.buckets
    assert [old.pacing(i) for i in range(1, 99)] == [
        new.pacing(i) for i in range(1, 99)
    ]
    assert Config.load(legacy(enabled=False, min_difficulty=999)).lengths is None


def test_lengths_are_rounded_down_to_a_few_buckets_and_the_config_says_so():
    config = Config.load(legacy(), ["data.max_buckets=3"])
    assert config.lengths is not None and config.lengths.buckets == (32, 144, 256)
    (line,) = notices(config)
    assert line.startswith("curriculum_learning: 29 lengths are rounded down to 3 (")
    assert notices(Config.load(config, ["data.max_buckets=29"])) == ()


def test_buckets_are_spread_and_keep_both_ends():
    assert buckets([1, 2, 3], 3) == (1, 2, 3)
    assert buckets(range(1, 101), 4) == (1, 34, 67, 100)
    assert buckets([5, 9], 1) == (9,)
    assert [round_down(n, (8, 16, 32)) for n in (1, 8, 15, 16, 99)] == [8, 8, 8, 16, 32]


WRONG = {
    "min above max": ({"min_difficulty": 300}, r"300 is above max_difficulty.* 256"),
    "longer than the context": (
        {"max_difficulty": 512},
        r"512 tokens are more than data.sequence_length, which is 256",
    ),
    "unequal lists": (
        {
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [8, 16], "max_step": [5, 9]},
        },
        r"schedule_config.difficulty: has 2 entries and max_step has 2",
    ),
    "descending ends": (
        {
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [8, 16, 24], "max_step": [9, 5]},
        },
        r"schedule_config.max_step: must be ascending",
    ),
    "a length of 0": ({"min_difficulty": 4}, "begins with sequences of 0 tokens"),
    "no total": (
        {"schedule_config": {"difficulty_step": 8}},
        "either total_curriculum_step or total_curriculum_tokens, and none is given",
    ),
    "two totals": (
        {
            "schedule_config": {
                "difficulty_step": 8,
                "total_curriculum_step": 9,
                "total_curriculum_tokens": 9,
            }
        },
        "and both are given",
    ),
    "no root": (
        {"schedule_type": "fixed_root"},
        "schedule_config.root_degree: is missing, and fixed_root needs it",
    ),
    "no function": (
        {"schedule_type": "custom", "schedule_config": {"difficulty": [8]}},
        "schedule_config.function: is missing, and custom needs it",
    ),
    "a mistyped key": (
        {"schedule_config": {**LINEAR["schedule_config"], "dificulty_step": 8}},
        "Did you mean 'difficulty_step'",
    ),
}


@pytest.mark.parametrize("make", [legacy, nested])
@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_schedule_is_refused_by_name(make, changed, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(make(**changed))
    # It is no unsupported key that could be left out.
    with pytest.raises(ConfigError, match=message):
        Config.load(make(**changed), ignore_unsupported=True)


def test_two_curricula_of_lengths_are_refused():
    with pytest.raises(ConfigError, match="shortens sequences, and so does data_eff"):
        Config.load(legacy() | nested())


def test_a_part_that_is_on_below_one_that_is_off_is_told():
    config = Config.load(nested(), ["data_efficiency.data_sampling.enabled=false"])
    assert config.lengths is None
    (line,) = notices(config)
    assert "because data_efficiency.data_sampling.enabled is false" in line


def test_a_function_that_is_not_there_is_named():
    config = {"function": f"{__name__}:absent", "difficulty": [8]}
    custom = {"schedule_type": "custom", "schedule_config": config}
    with pytest.raises(ValueError, match="absent' is not found"):
        Pacing.model_validate(LINEAR | custom)(1)
