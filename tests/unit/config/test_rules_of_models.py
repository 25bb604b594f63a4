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


def test_what_only_zinf_s_own_model_has_is_refused() -> None:
    Config.model_validate({**HUGGINGFACE, "adapter": {"r": 4}})
    section = {"curriculum_learning": {"enabled": True, **LENGTHS}}
    with pytest.raises(ConfigError, match="curriculum.*not supported with model.hug"):
        Config.load({**HUGGINGFACE, **section})
