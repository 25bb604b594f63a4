"""Sections that contradict the model."""

import pytest

from zinf.config import Config, ConfigError

HUGGINGFACE = {"model": {"huggingface": "folder"}, "train_batch_size": 2}
LENGTHS = {
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}


@pytest.mark.parametrize(
    ("section", "value"),
    [("adapter", {"r": 4}), ("curriculum_learning", {"enabled": True, **LENGTHS})],
)
def test_what_only_zinf_s_own_model_has_is_refused(section: str, value: dict) -> None:
    Config.model_validate(HUGGINGFACE)
    with pytest.raises(ConfigError, match=f"{section}.*not supported with model.hug"):
        Config.load({**HUGGINGFACE, section: value})
