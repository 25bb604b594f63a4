"""`zinf finetune`, and the config that it and `zinf plan --model` have by default."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from zinf import hf
from zinf.cli.endings import say as _say
from zinf.cli.endings import say_nothing
from zinf.cli.options import DRAWN, FINETUNE, keys_of
from zinf.cli.run_folder import check_places, check_resumed, decides, held_run
from zinf.cli.train import train_held
from zinf.core.config import Config
from zinf.core.config.grpo import Grpo
from zinf.core.config.load import override
from zinf.core.machine.devices import on_devices
from zinf.core.objectives import OBJECTIVES
from zinf.core.rollouts.functions import place_of_model
from zinf.data.configured import batch_size
from zinf.distributed import AbstractGroup

CONFIG = "finetune.yaml"
# Stands in for the steps of a run until its samples are counted.
STEPS_UNKNOWN = 1_000_000
EVALUATE_EVERY = 100
# Completions of a step, as of transformers' batch of a device.
PPO_SAMPLES = 8
LEARNING_RATE = 1e-5
# Adapters begin at zero change and learn at rates ten times those of whole weights:
# https://arxiv.org/abs/2106.09685, table 11.
ADAPTER_LEARNING_RATE = 2e-4
# As TRL and axolotl scale adapters: alpha is twice the rank.
ALPHA_OF_RANK = 2
# The rate rises over so much of the run, and falls to zero at its end.
WARMUP_RATIO = 0.03
SCHEDULE = {
    "type": "linear",
    "params": {"warmup_ratio": WARMUP_RATIO, "total_num_steps": "auto"},
}


def finetune_model(
    raw: dict[str, Any],
    overrides: Sequence[str],
    *,
    output: Path,
    merges: bool = True,
    epochs: float,
    group: AbstractGroup,
    allow_changed: Sequence[str] = (),
) -> None:
    """Trains the model of a config on its data, and writes the tuned model.

    The config is written to the folder of the run, which is `OUTPUT.run`. Adapters are
    written to `OUTPUT.adapter`, and the model with them added to `OUTPUT`.

    Args:
        raw: see `model_config`.
        merges: whether the model is written if it has adapters. Else they are written
            to `OUTPUT`, alone.
        epochs: how often each sample is used, if `run.steps` is not given.
        allow_changed: keys in which a resumed run may differ from before.
    """
    run = run_folder(output)
    exports = {"export": output}
    if "adapter" in raw and merges:
        exports["export_adapter"] = output.with_name(f"{output.name}.adapter")
    elif "adapter" in raw:
        exports = {"export_adapter": output}
    for folder in exports.values():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(
                f"{folder} is there already. Name another folder, or delete it first."
            )
    named = {key: str(folder) for key, folder in exports.items()}
    raw = raw | {"run": {"output": str(run), **named, **raw["run"]}}
    raw = override(raw, overrides)
    counts_epochs = isinstance(raw["run"], dict) and "steps" not in raw["run"]
    assumed = [f"run.steps={STEPS_UNKNOWN}"] if counts_epochs else []
    config = Config.load(raw, assumed)
    decided = hf.Task(config).settings_of_data(_say)
    if decided:
        raw["data"] |= decided
        config = Config.load(raw, assumed)
    hf.Task(config).check_exports()
    if not config.run.resume:
        hf.Task(config).check_files()
    if counts_epochs:
        # The samples of a step depend on the number of devices.
        config, _ = on_devices(raw, overrides=assumed)
        task = hf.Task(config)
        raw["run"]["steps"] = task.steps_of_epochs(batch_size(config), epochs, _say)
    config = Config.load(raw)
    if raw.get("scheduler") == SCHEDULE and _is_mostly_warmup(config.run.steps):
        raw["scheduler"] = {"type": "linear"}
        config = Config.load(raw)
    check_places(config)
    with held_run(config, group):
        path = run / CONFIG
        if group.is_first:
            # First, for the config of the run is still the one that is compared.
            check_resumed(config, decides(config), allow_changed, say_nothing)
            run.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
        config, mesh = on_devices(raw)
        train_held(
            config,
            mesh,
            path,
            (),
            trace=None,
            trace_steps=3,
            group=group,
            allow_changed=allow_changed,
        )


def run_folder(output: Path) -> Path:
    """The folder of the run that makes a tuned model."""
    return output.with_name(f"{output.name}.run")


def model_config(
    model: str, *, data: Sequence[Path] = (), samples: int = 1, **options: Any
) -> dict[str, Any]:
    """The keys and values of a config that trains a model of `transformers`.

    Parameters are in bfloat16 with masters in float32, the optimizer is AdamW with a
    rate that falls linearly after a warm-up, and the gradient is clipped to norm 1.
    With files for evaluation there is one every 100 steps and at last.

    Args:
        options: values of the options in `FINETUNE`, or with the objectives of `DRAWN`
            in those tables.

    Raises:
        ValueError: there are options of adapters, and no rank.
    """
    objective = OBJECTIVES.get(options.get("objective", "sft"))
    table = FINETUNE
    if objective is not None and objective.is_drawn:
        table = DRAWN[options["objective"]] | {"objective": FINETUNE["objective"]}
    chosen = dict(keys_of(table, options))
    rank, rate = chosen.get("adapter.r"), ADAPTER_LEARNING_RATE
    if rank is None:
        rate = LEARNING_RATE
        _refuse_adapters(chosen)
    else:
        chosen = {"adapter.lora_alpha": float(ALPHA_OF_RANK * rank)} | chosen
    if objective is not None:
        rate *= objective.rate
        if "validation_fraction" in objective.reads:
            chosen = {"data.validation_fraction": 0.0} | chosen
    if data:
        chosen["data.paths"] = [str(path) for path in data]
    if "data.evaluation_paths" in chosen:
        chosen["run.evaluate_every"] = EVALUATE_EVERY
    raw: dict[str, Any] = {
        "model": {"huggingface": model},
        "data": {},
        "train_batch_size": samples,
        "optimizer": {"type": "AdamW", "params": {"lr": rate}},
        "scheduler": deepcopy(SCHEDULE),
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "memory": {},
        "run": {},
    }
    for key, value in chosen.items():
        *sections, name = key.split(".")
        section = raw
        for below in sections:
            section = section.setdefault(below, {})
        section[name] = value
    return raw


def of_rewards(
    model: str,
    objective: str,
    *,
    rewards: Sequence[str],
    samples: int | None,
    **options: Any,
) -> dict[str, Any]:
    """As `model_config`, of a config that trains a model from rewards.

    Args:
        objective: grpo or ppo.
        rewards: functions, as FILE.py:FUNCTION, and folders or names of reward models;
            files and folders from the current folder on.
        samples: completions of a step; None: with grpo those of a prompt, else
            `PPO_SAMPLES`.
    """
    if samples is None and objective == "grpo":
        group = options.get("num_generations")
        samples = group or Grpo.model_fields["num_generations"].default
    options |= {"objective": objective, "samples": samples or PPO_SAMPLES}
    raw = model_config(model, **options)
    section = raw.setdefault(objective, {})
    # The config of the run is in another folder.
    section["rewards"] = [_from_here(name) for name in rewards]
    for key in {"critic", "environment", "teacher"} & section.keys():
        section[key] = _from_here(section[key])
    return raw


def _from_here(name: str) -> str:
    """A file or a folder by its whole path; a name on the hub as it is."""
    is_here = place_of_model(name, [Path.cwd()]) != name
    return str(Path.cwd() / name) if is_here else name


def _is_mostly_warmup(num_steps: int) -> bool:
    """Whether the default warm-up, whose first rate is 0, is half of a run or more."""
    return 2 * ceil(WARMUP_RATIO * num_steps) >= num_steps


def _refuse_adapters(chosen: Mapping[str, Any]) -> None:
    sections = (key.partition(".") for key in chosen)
    given = [name for section, _, name in sections if section == "adapter"]
    if given:
        raise ValueError(
            f"{', '.join(given)}: this is about adapters, and none are asked for. Add "
            "--lora RANK, such as --lora 16."
        )
