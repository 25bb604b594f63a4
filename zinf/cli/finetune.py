"""`zinf finetune`, and the config that it and `zinf plan --model` have by default."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from zinf import hf
from zinf.cli.problem import batch_size
from zinf.cli.train import train_config
from zinf.config import Config
from zinf.distributed import AbstractGroup

CONFIG = "finetune.yaml"


def finetune_model(
    raw: dict[str, Any],
    overrides: Sequence[str],
    *,
    output: Path,
    epochs: float,
    group: AbstractGroup,
) -> None:
    """Trains the model of a config on its data, and writes the tuned model.

    The config is written to the folder of the run, which is `OUTPUT.run`.

    Args:
        raw: see `model_config`.
        epochs: how often each sample is used, if `run.steps` is not given.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(
            f"{output} is there already. Name another folder, or delete it first."
        )
    run = output.with_name(f"{output.name}.run")
    raw = raw | {"run": {"output": str(run), "export": str(output), **raw["run"]}}
    config = Config.load(raw, overrides)
    if "steps" not in config.run.model_fields_set:
        task = hf.Task(config)
        raw["run"]["steps"] = task.steps_of_epochs(batch_size(config), epochs, _say)
    run.mkdir(parents=True, exist_ok=True)
    path = run / CONFIG
    path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    train_config(path, overrides, None, 3, group)


def model_config(
    model: str,
    *,
    data: Sequence[Path] = (),
    nvme: Path | None = None,
    learning_rate: float = 1e-5,
    samples: int = 1,
    sequence_length: int | None = None,
    steps: int | None = None,
    resumes: bool = False,
) -> dict[str, Any]:
    """The keys and values of a config that trains a model of `transformers`.

    Parameters are in bfloat16 with masters in float32, the optimizer is AdamW, and the
    gradient is clipped to norm 1.
    """
    run: dict[str, Any] = {} if steps is None else {"steps": steps}
    files: dict[str, Any] = {"validation_fraction": 0.0}
    if sequence_length is not None:
        files["sequence_length"] = sequence_length
    if data:
        files["paths"] = [str(path) for path in data]
    memory = {} if nvme is None else {"nvme": str(nvme)}
    return {
        "model": {"huggingface": model},
        "data": files,
        "train_batch_size": samples,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "memory": memory,
        "run": run | ({"resume": True} if resumes else {}),
    }


def _say(text: str) -> None:
    print(text, flush=True)
