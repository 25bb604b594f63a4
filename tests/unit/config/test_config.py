import copy
import pickle
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from zinf.config import Config, ConfigError
from zinf.program import Tier

GIB = 1024**3


def test_an_empty_config_leaves_everything_automatic():
    config = Config.load({})
    assert config.param_tier is None
    assert config.optimizer_tier is None
    assert config.activation_tier is None
    assert config.device_bytes is None
    assert config.host_bytes is None
    assert config.nvme_bytes is None
    assert config.nvme_paths == ()
    assert config.compute_dtype == "float32"
    assert config.loss_scaling is None
    assert config.clip_norm is None
    assert config.num_microbatches == 1
    assert config.microbatch_size is None
    assert config.batch_size is None
    assert config.segment_max_bytes is None
    assert config.persistence_bytes == 32 * 1024
    assert config.execution == "auto"
    assert config.frozen == ()
    assert config.model is None
    assert config.optimizer is None
    assert config.tensorboard_folder is None
    assert config.log_every == 10


def test_budgets_are_bytes_and_auto_is_none():
    config = Config.load(
        {
            "memory": {
                "device": "120GiB",
                "host": "auto",
                "nvme": ["a", "b"],
                "nvme_capacity": 4096,
            },
            "segment": {"max_bytes": "1GiB"},
            "persistence_threshold": "64KiB",
        }
    )
    assert config.device_bytes == 120 * GIB
    assert config.host_bytes is None
    assert config.nvme_bytes == 4096
    assert config.nvme_paths == (Path("a"), Path("b"))
    assert config.segment_max_bytes == GIB
    assert config.persistence_bytes == 64 * 1024


@pytest.mark.parametrize("value", [0, 0.0, None])
def test_zero_and_null_do_not_clip(value):
    assert Config.load({"gradient_clipping": value}).clip_norm is None


def test_clipping_is_the_global_norm():
    assert Config.load({"gradient_clipping": 1}).clip_norm == 1.0


def test_cpu_checkpointing_puts_activations_on_the_host():
    raw = {"activation_checkpointing": {"cpu_checkpointing": True}}
    assert Config.load(raw).activation_tier is Tier.HOST


def test_elements_of_the_persistence_threshold_are_fp32():
    raw = {"zero_optimization": {"stage3_param_persistence_threshold": 1e5}}
    assert Config.load(raw).persistence_bytes == 4 * 10**5


@pytest.mark.parametrize(
    "raw",
    [
        {"persistence_threshold": 0},
        {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    ],
)
def test_a_persistence_threshold_of_zero_is_no_default(raw):
    assert Config.load(raw).persistence_bytes == 0


def test_two_persistence_thresholds_are_refused():
    raw = {
        "zero_optimization": {"stage3_param_persistence_threshold": 1e5},
        "persistence_threshold": "4KiB",
    }
    with pytest.raises(ConfigError, match="remove one of them"):
        Config.load(raw)


def test_a_narrow_accumulation_dtype_is_refused():
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        Config.load({"data_types": {"grad_accum_dtype": "bf16"}})
    Config.load({"data_types": {"grad_accum_dtype": "fp32"}})


def test_steps_per_print_sets_log_every_unless_that_is_given():
    assert Config.load({"steps_per_print": 5}).log_every == 5
    assert Config.load({"steps_per_print": 5, "run": {"log_every": 7}}).log_every == 7


def test_tensorboard_folder_is_deepspeeds_or_below_the_output():
    section = {"enabled": True, "output_path": "logs", "job_name": "a"}
    assert Config.load({"tensorboard": section}).tensorboard_folder == Path("logs/a")
    raw = {"run": {"output": "out", "tensorboard": True}}
    assert Config.load(raw).tensorboard_folder == Path("out/tensorboard")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c, "execution", "fused"),
        lambda c: setattr(c.run, "steps", 3),
        lambda c: setattr(c.zero_optimization.offload_param, "device", "cpu"),
        lambda c: setattr(c.optimizer.params, "lr", 3.0),
        lambda c: setattr(c, "new", 3),
        lambda c: delattr(c.run, "steps"),
    ],
)
def test_configs_are_frozen_at_every_level(change):
    config = Config.load(
        {
            "zero_optimization": {"offload_param": {"device": "none"}},
            "optimizer": {"type": "AdamW"},
        }
    )
    before = config.model_dump()
    with pytest.raises((ValidationError, AttributeError)):
        change(config)
    assert config.model_dump() == before


def test_configs_are_values():
    config = Config.load({"run": {"steps": 3}, "train_batch_size": 8}, world_size=4)
    for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert same == config
        assert same.microbatch_size == 2
    assert hash(config) == hash(Config.load(config))


def test_the_constructor_checks_too():
    with pytest.raises(ValueError, match="fp16"):
        Config(bf16={"enabled": True}, fp16={"enabled": True})


def sections(section: type[BaseModel]):
    yield section
    for name in section.model_fields:
        below = section.section_at(name, {})
        if below is not None:
            yield from sections(below)


def test_every_key_has_a_sentence():
    for section in sections(Config):
        for name in section.known_keys():
            description = section.description_of(name)
            assert description.rstrip().endswith("."), f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {
                "execution": "fused",
                "zero_optimization": {"stage": 1, "cpu_offload": True},
            },
            "execution: fused keeps everything on the device, but zero_optimization",
        ),
        (
            {
                "execution": "fused",
                "activation_checkpointing": {"cpu_checkpointing": True},
            },
            "asks for the host tier",
        ),
        (
            {"segment": {"max_bytes": "2GiB"}, "memory": {"device": "1GiB"}},
            "more than memory.device",
        ),
        ({"memory": {"nvme_capacity": "1TiB"}}, "no effect without an NVMe tier"),
        ({"bf16": {}, "bfloat16": {}}, "old name of bf16"),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            "scheduler.params.total_num_steps: is unknown: give it, or run.steps",
        ),
        (
            {"optimizer": {"type": "Lion"}, "scheduler": {"type": "OneCycle"}},
            "cycle_min_lr: is required",
        ),
    ],
)
def test_impossible_combinations_are_refused(raw, words):
    with pytest.raises(ConfigError) as error:
        Config.load(raw)
    assert words in str(error.value)


def test_the_betas_of_lion_cannot_be_cycled():
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    raw = {
        "optimizer": {"type": "Lion"},
        "scheduler": {"type": "OneCycle", "params": cycle},
    }
    with pytest.raises(ConfigError, match="cycle_momentum: moving the betas of Lion"):
        Config.load(raw)
    Config.load(raw, ["scheduler.params.cycle_momentum=false"])


def test_the_run_tells_how_long_a_schedule_is():
    Config.load({"scheduler": {"type": "WarmupDecayLR"}, "run": {"steps": 9}})


def test_bfloat16_is_the_old_name_of_bf16():
    assert Config.load({"bfloat16": {"enabled": True}}).compute_dtype == "bfloat16"
