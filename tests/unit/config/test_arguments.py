""" "auto": filled from a trainer's arguments, or said to be chosen here."""

import pytest

from tests.unit.config.test_in_the_wild import (
    AUTO_ADAM,
    AUTO_BATCH,
    AUTO_DECAY,
    AUTO_PRECISION,
    AUTO_WARMUP,
)
from zinf.config import Config, Status, notices, report

FILE = {
    **AUTO_BATCH,
    **AUTO_PRECISION,
    "optimizer": AUTO_ADAM,
    "scheduler": AUTO_DECAY,
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


def test_arguments_of_a_trainer_fill_all_that_is_auto():
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


def test_what_no_argument_fills_is_as_the_trainer_has_it_and_said_in_one_line():
    config = Config.load(FILE)
    params = config.optimizer.params
    assert (params.lr, params.betas) == (5e-5, (0.9, 0.999))
    assert (params.eps, params.weight_decay) == (1e-8, 0.0)
    assert config.scheduler.params.warmup_num_steps == 0
    assert config.clip_norm == 1.0
    assert config.num_microbatches == 1
    assert config.compute_dtype == "float32"
    (line,) = notices(config)
    for words in (
        "optimizer.params.lr 5e-05",
        "optimizer.params.betas [0.9, 0.999]",
        "scheduler.params.warmup_num_steps 0",
        "gradient_clipping 1",
        "bf16.enabled false",
        "scheduler.params.total_num_steps 1000",
        "arguments=",
    ):
        assert words in line
    assert line in report(FILE).notes
    rows = {row.key: row for row in report(FILE).rows}
    assert rows["optimizer.params.lr"].status is Status.AUTOMATIC
    assert rows["optimizer.params.lr"].reason.startswith("Chosen here: 5e-05. ")
    assert rows["train_batch_size"].reason.startswith("As if absent. ")


def test_what_a_config_says_goes_before_arguments():
    raw = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "eps": "auto"}}}
    config = Config.load(raw, arguments=ARGUMENTS)
    assert (config.optimizer.params.lr, config.optimizer.params.eps) == (0.5, 1e-6)
    assert config.optimizer.params.weight_decay == 0.0  # absent, not "auto"


@pytest.mark.parametrize(
    ("scheduler", "lr"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}}, 3e-4),
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-6}}, 1e-6),
        (AUTO_WARMUP, 5e-5),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, 5e-5),
        (None, 5e-5),
    ],
)
def test_an_automatic_learning_rate_is_the_scheduler_s_if_that_has_one(scheduler, lr):
    config = Config.load({"optimizer": AUTO_ADAM, "scheduler": scheduler})
    assert config.optimizer.params.lr == lr
    is_chosen_here = ("optimizer", "params", "lr") in config.chosen
    assert is_chosen_here == (lr == 5e-5)


def test_an_automatic_length_is_that_of_the_run():
    config = Config.load({"scheduler": AUTO_DECAY, "run": {"steps": 77}})
    assert config.scheduler.params.total_num_steps is None
    assert config.run.steps == 77
    total = ("scheduler", "params", "total_num_steps")
    assert total not in config.chosen
    assert Config.load({"scheduler": AUTO_DECAY}).chosen[total] == 1000
    changed = Config.load(config, ["run.steps=5"])
    assert changed.scheduler.params.total_num_steps is None


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"warmup_ratio": 0.1, "max_steps": 300}, 30),
        ({"warmup_ratio": 0.1, "max_steps": -1}, 8),  # of run.steps
        ({"warmup_ratio": 0.1, "warmup_steps": 7, "max_steps": 300}, 7),
        ({"warmup_ratio": 0.0, "warmup_steps": 0}, 0),
    ],
)
def test_a_warm_up_is_steps_or_a_ratio_of_all(arguments, steps):
    raw = {"scheduler": AUTO_WARMUP, "run": {"steps": 75}}
    config = Config.load(raw, arguments=arguments)
    assert config.scheduler.params.warmup_num_steps == steps


def test_automatic_keys_that_the_plan_decides_are_not_said():
    raw = {
        "memory": {"device": "auto", "host": "auto"},
        "persistence_threshold": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "train_batch_size": "auto",
    }
    assert notices(Config.load(raw)) == ()


def test_what_was_chosen_is_still_said_of_a_config_that_is_loaded_again():
    config = Config.load({"optimizer": AUTO_ADAM})
    again = Config.load(config, ["optimizer.params.lr=0.25"], world_size=2)
    assert ("optimizer", "params", "lr") not in again.chosen
    assert again.chosen[("optimizer", "params", "eps")] == 1e-8
