"""What a config asks to do with a model, whoever made it: its task."""

from pathlib import Path

import optax
from jax.sharding import Mesh

from zinf import hf
from zinf.cli.gpt_task import GptTask
from zinf.cli.own_model import FunctionTask
from zinf.core.config import Config, notices
from zinf.core.engine.engine import Engine
from zinf.core.optim.transforms.factory import build_schedule
from zinf.data.configured import batch_size
from zinf.distributed import AbstractGroup, Alone

ALONE = Alone()


def task_of(config: Config) -> "GptTask | hf.Task":
    """The model, loss and data of a config; `hf.Task` says what its methods do."""
    model = config.model
    if is_published(config):
        return hf.Task(config)
    if model is not None and model.function is not None:
        return FunctionTask(config)
    return GptTask(config)


def is_published(config: Config) -> bool:
    """Whether the model is one of transformers."""
    return config.model is not None and config.model.huggingface is not None


def task_with_adapters(config: Config) -> "GptTask | hf.Task":
    """The task of a run that trained adapters.

    Raises:
        ValueError: the config has no adapter section.
    """
    if config.adapter is None:
        raise ValueError(
            "The config has no adapter section, so there is no adapter to export or "
            "merge. Give the config of the run that made the checkpoint."
        )
    return task_of(config)


def make_engine(config: Config, mesh: Mesh, group: AbstractGroup = ALONE) -> Engine:
    """The engine of a config, with its initial parameters.

    It measures the rates that it plans by, unless the config says otherwise.
    """
    if config.rates is None:
        config = config.model_copy(update={"rates": "measured"})
    return task_of(config).engine(mesh, group)


def learning_rate(config: Config) -> optax.Schedule:
    """The learning rate of a config, as a function of the number of updates done."""
    return build_schedule(config, task_of(config).rate_scale())


def refuse_teacher(config: Config, command: str) -> None:
    """Raise if a config has a teacher, whom a command does not know."""
    if config.distillation is not None:
        raise NotImplementedError(
            f"{command} does not know distillation yet. Leave the teacher out with "
            "--set distillation=null."
        )


def heading(path: Path | str, config: Config) -> str:
    """The title, and notes on the config, as lines."""
    notes = [f"note: {line}" for line in notices(config)]
    return "\n".join([title(path, config), *notes])


def title(path: Path | str, config: Config) -> str:
    """Config file, number of parameters, tokens per step and dtype, in one line.

    Parameters of a function of the user are counted when it has run; here it is named.
    """
    count = task_of(config).num_parameters
    if count is None:
        assert config.model is not None
        model = f"the model of {config.model.function}"
    else:
        model = f"{count:,} parameters"
    return (
        f"{path}: {model}, {num_tokens(config):,} tokens a step, {config.compute_dtype}"
    )


def num_tokens(config: Config) -> int:
    """Number of tokens that one step trains on; the most where steps differ."""
    batching = config.dynamic_batching
    if batching is not None and batching.max_tokens is not None:
        return config.num_microbatches * batching.max_tokens
    each = task_of(config).length * config.data.traits.num_sequences
    return batch_size(config) * each


def devices(mesh: Mesh) -> str:
    """Number and kind of the devices, in words."""
    return f"{mesh.size} of {mesh.devices.flat[0].device_kind}"
