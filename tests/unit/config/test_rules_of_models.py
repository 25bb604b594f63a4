"""Sections that contradict the model."""

import pytest

from zinf.config import Config, ConfigError, notices

HUGGINGFACE = {"model": {"huggingface": "folder"}, "train_batch_size": 2}
LENGTHS = {
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}


def lengths(**changed):
    section = {"curriculum_learning": {"enabled": True, **LENGTHS, **changed}}
    return {**HUGGINGFACE, **section}


def test_samples_of_a_model_of_transformers_follow_a_curriculum_of_lengths() -> None:
    Config.model_validate({**HUGGINGFACE, "adapter": {"r": 4}})
    found = Config.load(lengths()).lengths
    assert found is not None and found.buckets == tuple(range(8, 65, 8))


@pytest.mark.parametrize("objective", ["dpo", "classification"])
def test_a_curriculum_of_other_objectives_is_refused(objective) -> None:
    raw = lengths() | {"data": {"objective": objective}}
    with pytest.raises(ConfigError, match="curriculum.* is for data.objective sft"):
        Config.load(raw)


def test_a_sequence_of_one_token_predicts_none() -> None:
    schedule = {"total_curriculum_step": 100, "difficulty_step": 1}
    raw = lengths(min_difficulty=1, schedule_config=schedule)
    with pytest.raises(ConfigError, match="min_difficulty.*1 token, which predict"):
        Config.load(raw)


def batching(data=None, **changed):
    section = {"enabled": True, "max_tokens": 64, "metrics_path": "x", **changed}
    sampling = {"enabled": True, "dynamic_batching": section}
    efficiency = {"enabled": True, "data_sampling": sampling}
    return {**HUGGINGFACE, "data": data or {}, "data_efficiency": efficiency}


def test_batches_by_tokens_have_lengths_of_their_own() -> None:
    raw = batching() | {"curriculum_learning": {"enabled": True, **LENGTHS}}
    with pytest.raises(ConfigError, match="dynamic_batching.*lengths of its own"):
        Config.load(raw)


def test_dynamic_batching_is_read_as_deepspeed_spells_it() -> None:
    found = Config.load(batching(verbose=True)).dynamic_batching
    assert found is not None
    assert (found.max_tokens, found.min_batch_size, found.max_batch_size) == (
        *(64, 1),
        None,
    )
    assert (found.lr_scaling_method, found.sequence_picking_order) == (
        *("linear", "dataloader"),
    )
    config = Config.load(batching(), ["data_efficiency.data_sampling.enabled=false"])
    assert config.dynamic_batching is None
    (line,) = notices(config)
    assert "because data_efficiency.data_sampling.enabled is false" in line


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_tokens": None}, "max_tokens: is missing"),
        ({"min_batch_size": 65}, "65 rows are more than max_tokens, which is 64"),
        (
            {"min_batch_size": 4, "max_batch_size": 2},
            "min_batch_size: 4 is above max_batch_size, which is 2",
        ),
        ({"lr_scaling_method": "cubic"}, "lr_scaling_method"),
        ({"sequence_picking_order": "longest"}, "sequence_picking_order"),
        ({"max_token": 5}, "Did you mean 'max_tokens'"),
        ({"data": {"packing": True}}, "rows of data.packing are all as long"),
        ({"data": {"objective": "dpo"}}, "no effect on pairs"),
    ],
)
def test_wrong_dynamic_batching_is_refused_by_name(changed, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(batching(**changed))


def test_dynamic_batching_is_refused_where_it_would_change_nothing_or_too_much() -> (
    None
):
    own = {"num_layers": 1, "num_heads": 1, "embed_dim": 8, "max_length": 8}
    with pytest.raises(ConfigError, match="all samples have data.sequence_length"):
        Config.load({**batching(), "model": own})
    with pytest.raises(ConfigError, match="an overflow skips"):
        Config.load({**batching(), "fp16": {"enabled": True}})
    Config.load({**batching(lr_scaling_method="none"), "fp16": {"enabled": True}})
    both = batching()
    both["data_efficiency"]["data_routing"] = routing()
    with pytest.raises(ConfigError, match="with data_routing.random_ltd is not"):
        Config.load(both)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"labels": ["good", "bad"]}, r"labels: .*no effect \(data.objective sft"),
        ({"labels": ["a"], "objective": "dpo"}, "labels: .*data.objective dpo"),
        ({"packing": True, "objective": "dpo"}, "packing: .*data.objective dpo"),
        (
            {"packing": True, "objective": "classification"},
            "packing: .*data.objective classification",
        ),
    ],
)
def test_settings_of_another_objective_are_refused(data, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load({**HUGGINGFACE, "data": data})


def test_classes_are_named_and_texts_are_packed_where_the_objective_has_them() -> None:
    named = {"labels": ["good", "bad"], "objective": "classification"}
    assert Config.load({**HUGGINGFACE, "data": named}).data.labels == ("good", "bad")
    assert Config.load({**HUGGINGFACE, "data": {"packing": True}}).data.packing


def routing(**changed):
    schedule = {
        "min_value": 16,
        "max_value": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 16},
    }
    section = {"random_ltd_layer_id": [1], "random_ltd_schedule": schedule}
    return {"enabled": True, "random_ltd": {"enabled": True, **section, **changed}}


def test_models_of_transformers_may_drop_tokens_and_not_from_pairs() -> None:
    def config(data=None, **changed):
        efficiency = {"enabled": True, "data_routing": routing(**changed)}
        return {**HUGGINGFACE, "data": data or {}, "data_efficiency": efficiency}

    found = Config.load(config()).kept_tokens
    assert found is not None and found.layers == (1,)
    with pytest.raises(ConfigError, match="is for data.objective sft, not dpo"):
        Config.load(config(data={"objective": "dpo"}))
    counted = {"scheduler": {"type": "WarmupLR", "params": {}, "count": "layer_tokens"}}
    with pytest.raises(ConfigError, match="needs the number of layers of the model"):
        Config.load(config() | counted)
    assert Config.load(config(total_layer_num=4) | counted).num_layers == 4
