""" "auto": filled from a trainer's arguments, or chosen by zinf."""

from typing import Any

import pytest

from zinf.core.config import Config


def auto(kind: str, *names: str) -> dict[str, Any]:
    """A section of a type, all of whose parameters are "auto"."""
    return {"type": kind, "params": dict.fromkeys(names, "auto")}


ADAM = auto("AdamW", "lr", "betas", "eps", "weight_decay")
WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
DECAY = auto("WarmupDecayLR", *WARMUP, "total_num_steps")
TOTAL = ("scheduler", "params", "total_num_steps")
FILE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": ADAM,
    "scheduler": DECAY,
}
# By the names of transformers.TrainingArguments, as its to_dict gives them.
ARGUMENTS = {
    "learning_rate": 3e-4,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 20,
    "max_steps": 300,
    "bf16": True,
    "fp16": False,
    "output_dir": "is read by nobody here",
    "deepspeed": None,
}


def test_arguments_of_a_trainer_fill_all_that_is_auto() -> None:
    config = Config.load(FILE, arguments=ARGUMENTS, world_size=8)
    params = config.optimizer.params
    assert (params.lr, params.betas) == (3e-4, (0.8, 0.95))
    assert (params.eps, params.weight_decay) == (1e-6, 0.1)
    schedule = config.scheduler.params
    assert (schedule.warmup_min_lr, schedule.warmup_max_lr) == (0.0, 3e-4)
    assert (schedule.warmup_num_steps, schedule.total_num_steps) == (20, 300)
    assert config.clip_norm == 0.5
    assert (config.batch_size, config.microbatch_size) == (64, 4)
    assert config.num_microbatches == 2
    assert config.compute_dtype == "bfloat16"
    # TrainingArguments has no warmup_min_lr.
    assert set(config.chosen) == {("scheduler", "params", "warmup_min_lr")}


def test_what_no_argument_fills_is_as_the_trainer_has_it() -> None:
    config = Config.load(FILE)
    params = config.optimizer.params
    assert (params.lr, params.betas) == (5e-5, (0.9, 0.999))
    assert (params.eps, params.weight_decay) == (1e-8, 0.0)
    assert config.scheduler.params.warmup_num_steps == 0
    assert (config.clip_norm, config.num_microbatches) == (1.0, 1)
    assert config.compute_dtype == "float32"
    # One of two arguments that make a list.
    half = Config.load({"optimizer": ADAM}, arguments={"adam_beta2": 0.5})
    assert half.optimizer.params.betas == (0.9, 0.5)


def test_what_a_config_says_goes_before_arguments() -> None:
    raw = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "eps": "auto"}}}
    params = Config.load(raw, arguments=ARGUMENTS).optimizer.params
    assert (params.lr, params.eps) == (0.5, 1e-6)
    assert params.weight_decay == 0.0  # absent, not "auto"


@pytest.mark.parametrize(
    ("scheduler", "lr"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}}, 3e-4),
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-6}}, 1e-6),
        (auto("WarmupLR", *WARMUP), 5e-5),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, 5e-5),
        (None, 5e-5),
    ],
)
def test_an_automatic_learning_rate_is_the_schedulers_if_that_has_one(
    scheduler: Any, lr: float
) -> None:
    config = Config.load({"optimizer": ADAM, "scheduler": scheduler})
    assert config.optimizer.params.lr == lr
    assert (("optimizer", "params", "lr") in config.chosen) == (lr == 5e-5)


def test_an_automatic_length_is_that_of_the_run() -> None:
    config = Config.load({"scheduler": DECAY, "run": {"steps": 77}})
    assert config.scheduler.params.total_num_steps is None
    assert TOTAL not in config.chosen
    assert Config.load({"scheduler": DECAY}).chosen[TOTAL] == 1000
    changed = Config.load(config, ["run.steps=5"])
    assert changed.scheduler.params.total_num_steps is None


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"warmup_ratio": 0.1, "max_steps": 300}, 30),
        ({"warmup_ratio": 0.1, "max_steps": -1}, 8),  # of run.steps, rounded up
        ({"warmup_ratio": 0.1, "max_steps": 0}, 8),
        ({"warmup_ratio": 0.1, "max_steps": 1}, 1),
        ({"warmup_ratio": 0.1, "warmup_steps": 7, "max_steps": 300}, 7),
        ({"warmup_ratio": 0.0, "warmup_steps": 0}, 0),
    ],
)
def test_a_warm_up_is_steps_or_a_ratio_of_all(arguments: Any, steps: int) -> None:
    raw = {"scheduler": auto("WarmupLR", *WARMUP), "run": {"steps": 75}}
    config = Config.load(raw, arguments=arguments)
    assert config.scheduler.params.warmup_num_steps == steps
