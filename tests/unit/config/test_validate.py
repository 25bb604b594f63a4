"""Strictness: whatever is wrong is named, with its full path and what is allowed."""

import pytest

from zinf.config import Config, ConfigError


def problems(raw, overrides=()):
    with pytest.raises(ConfigError) as error:
        Config.load(raw, overrides)
    return {str(problem) for problem in error.value.problems}, str(error.value)


def nested(path, value):
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize(
    ("path", "near", "allowed"),
    [
        ("train_batchsize", "train_batch_size", "gradient_clipping"),
        ("zero_optimisation", "zero_optimization", "zero_optimization"),
        ("zero_optimization.stge", "stage", "offload_param"),
        ("zero_optimization.offload_param.devise", "device", "nvme_path"),
        ("zero_optimization.offload_optimizer.pin_mem", "pin_memory", "nvme_path"),
        ("zero_optimization.leaf_module.name", "names", "classes"),
        ("aio.blocksize", "block_size", "queue_depth"),
        ("bf16.enable", "enabled", "enabled"),
        ("fp16.loss_scale_windw", "loss_scale_window", "hysteresis"),
        ("activation_checkpointing.cpu_checkpoint", "cpu_checkpointing", "profile"),
        ("data_types.grad_acum_dtype", "grad_accum_dtype", "param_dtype"),
        ("memory.devise", "device", "nvme_capacity"),
        ("segment.max_byte", "max_bytes", "max_bytes"),
        ("data.sequence_len", "sequence_length", "glob"),
        ("run.step", "steps", "checkpoint_every"),
        ("autotuning.enabeld", "enabled", "tuner_type"),
        ("wandb.projekt", "project", "team"),
        ("pipeline.stage", "stages", "partition"),
    ],
)
def test_an_unknown_key_at_any_level_names_path_nearest_and_allowed(
    path, near, allowed
):
    _, message = problems(nested(path, 1))
    assert f"{path}: unknown key. Did you mean {near!r}? Allowed keys" in message
    assert allowed in message.split("Allowed keys", 1)[1]


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_unknown_parameters_name_those_of_the_type(section):
    kind = {"optimizer": "adamw", "scheduler": "WarmupLR"}[section]
    key = {"optimizer": "weight_decya", "scheduler": "warmup_num_step"}[section]
    near = {"optimizer": "weight_decay", "scheduler": "warmup_num_steps"}[section]
    _, message = problems({section: {"type": kind, "params": {key: 1}}})
    assert f"{section}.params.{key}: unknown key. Did you mean {near!r}?" in message


def test_a_key_at_the_wrong_level_is_told_where_it_belongs():
    _, message = problems({"stage": 3, "nvme_path": "x"})
    assert "exists as zero_optimization.stage." in message
    assert "zero_optimization.offload_param.nvme_path" in message


def test_keys_that_are_no_text_are_refused():
    problems({1: 2})


def test_all_problems_are_in_one_message():
    found, message = problems(
        {
            "train_batch_sise": 3,
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": {"stage": 9, "offload_param": {"device": "nvm"}},
            "memory": {"device": "12 GX", "nvme": [1]},
            "fp16": {"enabled": True},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdmW", "params": {"lrr": 3}},
            "scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": "x"}},
            "sparse_attention": {"mode": "fixed"},
            "model": {"num_layers": "3"},
            "run": 3,
        }
    )
    paths = {problem.split(":")[0].split(" = ")[0] for problem in found}
    assert paths == {
        "train_batch_sise",
        "train_batch_size",
        "zero_optimization.stage",
        "zero_optimization.offload_param.device",
        "memory.device",
        "memory.nvme[0]",
        "fp16.enabled",
        "optimizer.type",
        "scheduler.params.cycle_max_lr",
        "scheduler.params.cycle_min_lr",
        "sparse_attention",
        "model.num_layers",
        "model.num_heads",
        "model.embed_dim",
        "model.max_length",
        "run",
    }
    assert f"has {len(paths)} problems" in message


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("zero_optimization.stage", 4, "less than or equal to 3"),
        ("zero_optimization.stage", -1, "greater than or equal to 0"),
        ("zero_optimization.stage", "3", "valid integer"),
        ("zero_optimization.cpu_offload", "true", "valid boolean"),
        ("zero_optimization.cpu_offload", 1, "valid boolean"),
        ("zero_optimization", [3], "mapping with keys among stage"),
        ("zero_optimization.offload_param", "cpu", "mapping with keys among device"),
        ("zero_optimization.offload_param.device", "gpu", "'none', 'cpu' or 'nvme'"),
        ("zero_optimization.offload_param.device", "nvm", "Did you mean 'nvme'?"),
        ("gradient_clipping", -1.0, "greater than or equal to 0"),
        ("gradient_clipping", float("nan"), "finite"),
        ("gradient_clipping", float("inf"), "finite"),
        ("gradient_clipping", "1.0", "valid number"),
        ("bf16.enabled", "yes", "valid boolean"),
        ("fp16.hysteresis", 0, "greater than or equal to 1"),
        ("memory.device", "12 GX", "Did you mean 'GB'?"),
        ("memory.device", 0, "greater than or equal to 1"),
        ("memory.nvme", [], "at least 1"),
        ("memory.nvme", [""], "must be a path"),
        ("segment.max_bytes", "1.5", "not a whole number"),
        ("execution", "stream", "Did you mean 'streamed'?"),
        ("frozen", "embed/*", "must be a list"),
        ("frozen", [""], "at least 1 character"),
        ("persistence_threshold", "32 KIB?", "not a size"),
        ("data.paths", "stdlb", "Did you mean 'stdlib'?"),
        ("data.paths", "stdlb", "Write ./stdlb for a folder"),
        ("data.paths", "", "list of files and folders"),
        ("data.paths", [], "list of files and folders"),
        ("data.paths", [3], "no path"),
        ("data.validation_fraction", 1.0, "less than 1"),
        ("run.steps", 0, "greater than or equal to 1"),
        ("run.resume", "auto", "valid boolean"),
        ("run.output", "", "must be a path"),
        ("data_types.grad_accum_dtype", "fp64", "'fp32'"),
        ("optimizer", "AdamW", "mapping with keys among type, params"),
        ("optimizer.type", 3, "must be one of Adam, AdamW"),
        ("wandb", 3, "mapping"),
    ],
)
def test_a_wrong_value_names_path_value_and_what_is_allowed(path, value, words):
    _, message = problems(nested(path, value))
    line = next(line for line in message.splitlines() if f"  {path}" in line)
    assert words in line


def test_a_long_value_is_shortened():
    _, message = problems({"run": {"steps": "x" * 500}})
    assert "..." in message
    assert "x" * 100 not in message


def test_null_is_no_section_but_no_number_either():
    assert Config.load({"zero_optimization": None, "scheduler": None}) == Config()
    problems({"run": {"steps": None}})


def test_problems_do_not_repeat_what_only_follows():
    """Without its wrong device no tier is asked for, so nothing more can be said."""
    found, _ = problems(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvm"}}}
    )
    assert len(found) == 1
