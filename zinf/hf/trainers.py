"""What trainers from rewards have in common, with TRL's names and defaults.

`GRPOTrainer` and `PPOTrainer` are subclasses, which say which section of a config has
the settings of their method.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from zinf.checkpoint import Checkpoints
from zinf.core.config import Config
from zinf.core.config.adapter import Adapter
from zinf.core.config.completions import Completions
from zinf.core.config.load import override, raw_config
from zinf.core.config.nearest import did_you_mean
from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.names import listed
from zinf.core.machine.devices import on_devices
from zinf.core.optim.transforms.factory import build_schedule
from zinf.core.rollouts.asking import Function
from zinf.core.rollouts.calls import Reward
from zinf.core.trainer import Trainer
from zinf.data.configured import batch_size
from zinf.hf.adapter import NEUTRAL
from zinf.hf.card import run_of
from zinf.hf.engine import ModelEngine
from zinf.hf.export import export, export_adapter
from zinf.hf.judge import judges_among, load_rewards
from zinf.hf.model import Model
from zinf.hf.objectives.from_rewards import (
    environment_of,
    longest,
    read_prompts,
    rollouts_of,
)
from zinf.hf.records import records
from zinf.hf.task import Task
from zinf.observe.record import METRICS, TRACE, RunRecord

logger = logging.getLogger(__name__)
# Attributes of PEFT's `LoraConfig` that change nothing of what is trained here.
ABOUT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type"),
    *("peft_version", "revision", "fan_in_fan_out", "megatron_core"),
    *("qalora_group_size", "runtime_config", "task_type"),
}
# Arguments of TRL's configs that are not of a method: keys of the config, and what
# TRL has by default.
TRAINING: dict[str, tuple[str, Any]] = {
    "output_dir": ("run.output", "trainer_output"),
    "learning_rate": ("optimizer.params.lr", 5e-5),
    "weight_decay": ("optimizer.params.weight_decay", 0.0),
    "adam_epsilon": ("optimizer.params.eps", 1e-8),
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu", 8),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "max_grad_norm": ("gradient_clipping", 1.0),
    "bf16": ("bf16.enabled", True),
    "seed": ("run.seed", 42),
    "save_steps": ("run.checkpoint_every", 500),
    "save_total_limit": ("run.keep_checkpoints", None),
    "logging_steps": ("run.log_every", 10),
}
SCHEDULE = {"lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0}
BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
SIZES = ("train_batch_size", *(TRAINING[name][0] for name in (
    "per_device_train_batch_size", "gradient_accumulation_steps")))  # fmt: skip
# TRL's names of the correction for another sampler; zinf has its own sampler.
OF_VLLM = "vllm_"
# Settings of TRL that have no effect: zinf has its own way.
OTHERWISE = frozenset(
    {
        *("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization"),
        *("vllm_tensor_parallel_size", "vllm_max_model_length"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "report_to"),
        *("remove_unused_columns", "log_completions", "num_completions_to_print"),
        *("logging_first_step", "logging_strategy", "save_strategy", "run_name"),
        *(
            "dataloader_num_workers",
            "ds3_gather_for_generation",
            "cast_lm_head_to_fp32",
        ),
        *("use_liger_kernel", "use_liger_loss", "disable_dropout"),
        *("num_sample_generations", "local_rollout_forward_batch_size"),
        *("stop_token", "exp_name", "dataset_num_proc"),
    }
)


@dataclass(frozen=True, init=False)
class AbstractRewardConfig:
    """What a config of TRL says: settings of a method, and arguments of training.

    Attributes:
        SECTION: the method's section of a config, with TRL's names.
        DEFAULTS: arguments whose defaults are others than those of `TRAINING`.
        COUNTS: arguments that say how long training is, with their defaults.
        section: keys of that section that were given.
        training: arguments in `TRAINING` and beside it that were given.
    """

    SECTION: ClassVar[type[Completions]]
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    COUNTS: ClassVar[Mapping[str, Any]] = {"num_train_epochs": 3.0, "max_steps": -1}
    section: Mapping[str, Any]
    training: Mapping[str, Any]

    def __init__(self, **given: Any) -> None:
        """Takes the arguments of TRL's class of this name.

        Raises:
            ValueError: an argument is unknown, or asks for something that zinf does
                not do. One without effect is named in a warning.
        """
        fields, own_name = self.SECTION.model_fields, type(self).__name__
        section: dict[str, Any] = {}
        training: dict[str, Any] = {}
        unused: list[str] = []
        known = {*TRAINING, *self.COUNTS, *SCHEDULE, *BETAS}
        for name, value in given.items():
            own = name.removeprefix(OF_VLLM)
            if own in fields:
                section[own] = value
            elif name in known:
                training[name] = value
            elif name == "max_prompt_length":
                raise ValueError(
                    f"Prompts are not cut, so {own_name} has no 'max_prompt_length'. "
                    "Leave it out, and long prompts out of train_dataset."
                )
            elif name not in OTHERWISE:
                names = {*fields, *known}
                raise ValueError(
                    f"{own_name} has no {name!r}.{did_you_mean(name, names)} It has "
                    f"{', '.join(sorted(names))}. Other settings are keys of config=."
                )
            elif value:
                unused.append(name)
        if unused:
            logger.warning(
                f"{own_name} ignores {listed(unused)}: zinf has its own way of "
                "generating, logging and saving memory; see config=."
            )
        object.__setattr__(self, "section", section)
        object.__setattr__(self, "training", training)

    def raw(self, config: ConfigSource) -> dict[str, Any]:
        """The keys and values of a config, with TRL's defaults where it says nothing.

        Raises:
            ValueError: an argument has a value that zinf does not know.
        """
        if isinstance(config, Config):
            raise ValueError(
                "Trainers read config= as a mapping or a file, to which they add "
                "what args= says. Give what the Config was made of."
            )
        raw = raw_config(config)
        given = self.training
        sizes = {key for key, _ in TRAINING.values() if key in SIZES}
        has_sizes = any(key in raw for key in SIZES)
        for name, (key, usual) in TRAINING.items():
            usual = self.DEFAULTS.get(name, usual)
            if name in given:
                put(raw, key, given[name])
            elif usual is not None and not (key in sizes and has_sizes):
                put(raw, key, usual, only_absent=True)
        optimizer = raw["optimizer"]
        optimizer.setdefault("type", "AdamW")
        betas = [given.get(name, usual) for name, usual in BETAS.items()]
        put(raw, "optimizer.params.betas", betas, only_absent=not {*BETAS} & {*given})
        if "scheduler" not in raw or {*SCHEDULE} & {*given}:
            raw["scheduler"] = _schedule({**SCHEDULE, **given})
        if "seed" in given or "seed" not in raw.get("data", {}):
            put(raw, "data.seed", raw["run"]["seed"])
        objective = self.SECTION.KEY
        raw[objective] = {**(raw.get(objective) or {}), **self.section}
        put(raw, "data.objective", objective)
        return raw

    def num_steps(self, samples_of_epoch: int, batch: int) -> int:
        """Steps of the run, by `max_steps` or `num_train_epochs`."""
        counts = {**self.COUNTS, **self.training}
        steps, epochs = int(counts["max_steps"]), float(counts["num_train_epochs"])
        return steps if steps > 0 else max(1, ceil(epochs * samples_of_epoch / batch))


def put(
    raw: dict[str, Any], key: str, value: Any, *, only_absent: bool = False
) -> None:
    *sections, name = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
    if not (only_absent and name in raw):
        raw[name] = str(value) if isinstance(value, Path) else value


def _schedule(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    name = str(getattr(asked["lr_scheduler_type"], "value", asked["lr_scheduler_type"]))
    if name == "constant":
        return None
    known = ("linear", "cosine", "constant_with_warmup")
    if name not in known:
        raise ValueError(
            f"lr_scheduler_type is {name!r}; it must be constant, {', '.join(known)}. "
            "Others are set by config={'scheduler': ...}."
        )
    params: dict[str, Any] = {"warmup_num_steps": asked["warmup_steps"]}
    if not asked["warmup_steps"] and asked["warmup_ratio"]:
        params = {"warmup_ratio": asked["warmup_ratio"]}
    if name != "constant_with_warmup":
        params["total_num_steps"] = "auto"
    return {"type": name, "params": params}


class AbstractRewardTrainer:
    """Trains a model of `transformers` from rewards; see TRL's class of the same name.

    A context manager; `close` frees the engine.

    Args:
        model: a folder, a name on the hub, or what `zinf.hf.load` returned.
        reward_funcs: a function or several, with TRL's arguments `(prompts,
            completions, completion_ids, **columns)`, also `async`; or their names, such
            as "rewards.py:correct", or folders and names of reward models.
        args: as TRL's.
        train_dataset: records with `prompt` (a text or messages) and columns for the
            reward functions; or files of those.
        config: placement and all else: keys of a zinf config, or a file of them.
        peft_config: an adapter, as PEFT's `LoraConfig` describes it; also
            `config={"adapter": ...}`.

    Attributes:
        ARGUMENTS: the class of `args`.
        environment: what replies to what the model wrote, or its name, such as
            "play.py:reply"; see `GRPOTrainer`.
        engine: the engine, which also generates and scores.
        rollouts: what draws the batches.

    Raises:
        ValueError, NotImplementedError: by name, what is asked and does not go
            together; before weights are read.
    """

    ARGUMENTS: ClassVar[type[AbstractRewardConfig]]
    environment: Function | str | None = None
    engine: ModelEngine

    def __init__(
        self,
        model: str | Path | Model,
        reward_funcs: Callable | str | Path | Sequence[Callable | str | Path],
        args: AbstractRewardConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        config: ConfigSource = None,
        *,
        peft_config: Any = None,
    ) -> None:
        args = self.ARGUMENTS() if args is None else args
        raw = args.raw(config)
        name = str(model)
        if isinstance(model, Model):
            # Its name is that of the base of an adapter.
            model.check_whole()
            name = model.name
        put(raw, "model.huggingface", name)
        if peft_config is not None:
            raw["adapter"] = adapter_section(peft_config)
        put(raw, "run.steps", 1, only_absent=True)
        loaded, mesh = on_devices(raw)
        self._mesh, task = mesh, Task(loaded)
        prompts = read_prompts(task.model, _records(train_dataset))
        if loaded.data.sequence_length is None:
            length = longest(prompts, loaded)
            most = task.model.max_length
            length = length if most is None else min(length, most)
            raw = override(raw, [f"data.sequence_length={length}"])
        settings = loaded.completions
        per_epoch = len(prompts) * settings.group_size * settings.num_uses
        steps = args.num_steps(per_epoch, batch_size(loaded))
        raw = override(raw, [f"run.steps={steps}"])
        self.config, _ = on_devices(raw, mesh)
        self.task = Task(self.config)
        functions = _functions(reward_funcs, self.config)
        drawing = self.task.objective.drawing
        assert drawing is not None, "the objective is drawn"
        given = self.task.model, self.config, prompts, functions
        rollouts = rollouts_of(
            drawing.kind,
            *given,
            length=self.task.length,
            environment=environment_of(self.config, self.environment),
        )
        self.engine = self.task.engine(mesh, judges=judges_among(functions, prompts))
        self.rollouts = drawing.by(rollouts, self.engine, self.config)

    def train(self, resume_from_checkpoint: bool = False) -> dict[str, Any]:
        """Train, and return the metrics of the last step.

        Metrics, completions, checkpoints and what `zinf report` draws (`run.json`, a
        trace of the first steps) are in `output_dir`.

        Args:
            resume_from_checkpoint: go on from the newest checkpoint.
        """
        run = self.config.run
        folder = run.output / "checkpoints"
        with Checkpoints(folder, keep=run.keep_checkpoints) as checkpoints:
            latest = checkpoints.latest_step() if resume_from_checkpoint else None
            self._record(after_step=latest or 0).save(run.output)
            return Trainer(
                self.engine,
                self.rollouts,
                steps=run.steps,
                checkpoints=checkpoints,
                checkpoint_every=run.checkpoint_every,
                metrics=self._metrics,
                trace=run.output / TRACE,
                log_every=run.log_every,
                learning_rate=build_schedule(self.config),
                describe=self.task.describe,
                hooks=[self.rollouts.hook],
                resume=resume_from_checkpoint,
            ).run()

    @property
    def _metrics(self) -> Path:
        return self.config.run.metrics or self.config.run.output / METRICS

    def _record(self, *, after_step: int) -> RunRecord:
        """What `zinf report` reads beside the metrics."""
        config, task, planner = self.config, self.task, self.engine.planner
        num_tokens, devices = batch_size(config) * task.length, self._mesh.devices
        return RunRecord.of(
            config,
            self.engine.plan,
            title=(
                f"{task.model.name}: {task.num_parameters:,} parameters, "
                f"{num_tokens:,} tokens a step, {config.compute_dtype}"
            ),
            num_tokens=num_tokens,
            devices=f"{devices.size} of {devices.flat[0].device_kind}",
            has_measured_rates=planner.has_measured_rates,
            begun=datetime.now().astimezone().isoformat(" ", "minutes"),
            after_step=after_step,
            metrics=self._metrics,
            trace=config.run.output / TRACE,
        )

    def save_model(self, output_dir: str | Path) -> None:
        """Write the trained model, or with adapters these alone, as TRL does."""
        run = self.config.run
        trained = run_of(self.config, run.metrics or run.output / METRICS)
        if self.engine.adapted is not None:
            export_adapter(self.engine, output_dir, run=trained)
            return
        dtype = self.task.model.stored_dtype or self.config.compute_dtype
        export(self.engine, output_dir, dtype=dtype, run=trained)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def adapter_section(peft_config: Any) -> dict[str, Any]:
    """The `adapter` section of what a `LoraConfig` of PEFT says, or a mapping.

    What it says beside and would change what is trained stays: no config has such keys,
    so they are refused by name.
    """
    is_mapping = isinstance(peft_config, Mapping)
    values = peft_config if is_mapping else vars(peft_config)
    if not is_mapping and values.get("target_modules") is None:
        logger.warning(
            "peft_config has no target_modules: all linear layers get adapters, and "
            "not those that PEFT has for this architecture."
        )
    found: dict[str, Any] = {}
    for name, value in values.items():
        is_own = name in Adapter.model_fields
        is_neutral = value is False or value in NEUTRAL.get(name, ())
        if value is None or value in ([], {}, set()) or name in ABOUT:
            continue
        if is_own or not is_neutral:
            found[name] = sorted(value) if isinstance(value, set) else value
    return found


def _functions(asked: Any, config: Config) -> tuple[Reward, ...]:
    is_one = callable(asked) or isinstance(asked, str | Path)
    given = [asked] if is_one else list(asked)
    folders, found = config.folders_of_modules(), list[Reward]()
    for each in given:
        if isinstance(each, str | Path):
            found += load_rewards([str(each)], folders)
        elif isinstance(each, torch.nn.Module):
            raise ValueError(
                f"A reward is a {type(each).__name__} of torch, and zinf runs reward "
                "models from their files. Give its folder, as save_pretrained writes "
                "it with its tokenizer, or its name on the hub."
            )
        else:
            found.append(each)
    return tuple(found)


def _records(dataset: Any) -> Iterable[tuple[Any, str]]:
    if dataset is None:
        raise ValueError("There is no train_dataset. Give records with prompts.")
    if isinstance(dataset, str | Path):
        return records(Path(dataset))
    return ((x, f"train_dataset, record {n}") for n, x in enumerate(dataset, 1))
