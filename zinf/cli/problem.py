"""Builds the model, data and optimizer of a config for the commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zinf import hf, models
from zinf.adapt import Adapted, adapt, load_adapter
from zinf.cli.own_model import own_arguments
from zinf.core.config import Config, Model, notices
from zinf.core.engine.engine import Engine
from zinf.core.engine.initialize import initialize
from zinf.core.optim.transforms.factory import build_optimizer, build_schedule
from zinf.core.problem.weighted import Weighted
from zinf.data import (
    TEACHER_LOGITS,
    describe,
    text_dataset,
)
from zinf.data.configured import difficulties, paced
from zinf.data.text import Split, read_tokens, tokens_hash
from zinf.distributed import AbstractGroup, Alone
from zinf.models import GPTConfig

ALONE = Alone()


def problem(
    config: Config, group: AbstractGroup = ALONE
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `initialize` for the model, data and optimizer of a config.

    A model of `transformers` has parameters of 0 here, to plan with; `make_engine` has
    those of its files.
    """
    if is_huggingface(config):
        return hf.Task(config).arguments(batch_size(config) // group.count)
    if is_own(config):
        return _own_problem(config, group)
    loss, init, named = _given(config, group)
    distillation = config.distillation
    if distillation is not None:
        named["batch"] |= {TEACHER_LOGITS: teacher_logits(config, named["batch"])}
    has_experts = any(gpt_config(config).experts_of_blocks)
    if config.adapter is None and (has_experts or distillation is not None):
        # How experts are used, and how far the teacher is, for the metrics.
        init, loss = models.init_and_loss(
            gpt_config(config),
            seed=config.run.seed,
            has_aux=True,
            coefficient=1.0 if distillation is None else distillation.coefficient,
            temperature=1.0 if distillation is None else distillation.temperature,
        )
        named["has_aux"] = True
    optimizer, told = build_optimizer(config), config.told()
    if config.adapter is None:
        return (loss, init, optimizer, told), named
    adapted = _with_adapters(config, loss, init, named)
    named["eval_loss_fn"] = adapted.eval_loss_fn
    return (adapted.loss_fn, adapted.params, optimizer, adapted.config(told)), named


def _own_problem(
    config: Config, group: AbstractGroup
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `initialize` for what `model.function` returns."""
    named = own_arguments(config)
    loss, params = named.pop("loss_fn"), named.pop("params")
    named = {"rng": None, "batch": _batch_spec(config, group)} | named
    return (loss, params, build_optimizer(config), config.told()), named


def _batch_spec(
    config: Config, group: AbstractGroup
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of this process's part of a batch of a config's data."""
    shape = batch_size(config) // group.count, config.sequence_length + 1
    return {"tokens": jax.ShapeDtypeStruct(shape, np.int32)}


def teacher_logits(config: Config, batch: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """What a teacher adds to a batch of a config's own model."""
    rows, length = batch["tokens"].shape
    shape = rows, length - 1, gpt_config(config).vocab_size
    return jax.ShapeDtypeStruct(shape, np.float32)


def refuse_teacher(config: Config, command: str) -> None:
    """Raise if a config has a teacher, whom a command does not know."""
    if config.distillation is not None:
        raise NotImplementedError(
            f"{command} does not know distillation yet. Leave the teacher out with "
            "--set distillation=null."
        )


def adapted_model(config: Config) -> Adapted:
    """The adapted model of a config, of which only shapes are known.

    Raises:
        ValueError: the config has no adapter section.
    """
    if config.adapter is None:
        raise ValueError(
            "The config has no adapter section, so there is no adapter to export or "
            "merge. Give the config of the run that made the checkpoint."
        )
    if is_huggingface(config):
        return hf.Task(config).adapted()
    return _with_adapters(config, *_given(config, ALONE))


def _with_adapters(
    config: Config, loss: Callable, init: Callable, named: dict[str, Any]
) -> Adapted:
    assert config.adapter is not None
    found = adapt(loss, init, config.adapter, **named)
    begin_from = config.adapter.begin_from
    return found if begin_from is None else load_adapter(found, begin_from)


def _given(
    config: Config, group: AbstractGroup
) -> tuple[Callable, Callable, dict[str, Any]]:
    """The loss and the parameters of a config's model, and its key and batch."""
    model = gpt_config(config)
    init, loss = models.init_and_loss(model, seed=config.run.seed)
    dropout = 0.0 if config.adapter is None else config.adapter.lora_dropout
    sums = models.held_out_sums(model)
    named = {
        "rng": jax.random.key(config.run.seed) if model.dropout or dropout else None,
        "batch": _batch_spec(config, group),
        "eval_loss_fn": lambda params, batch: Weighted(*sums(params, batch)),
    }
    return loss, init, named


def make_engine(config: Config, mesh: Mesh, group: AbstractGroup = ALONE) -> Engine:
    """The engine of a config, with its initial parameters.

    It measures the rates that it plans by, unless the config says otherwise.
    """
    if config.rates is None:
        config = config.model_copy(update={"rates": "measured"})
    if is_huggingface(config):
        rows = batch_size(config) // group.count
        return hf.Task(config).engine(rows, mesh=mesh, group=group)
    arguments, named = problem(config, group)
    return initialize(*arguments, **named, mesh=mesh, group=group)


def is_huggingface(config: Config) -> bool:
    """Whether the model of a config is one of `transformers`."""
    return config.model is not None and config.model.huggingface is not None


def is_own(config: Config) -> bool:
    """Whether a function of the user makes the model of a config."""
    return config.model is not None and config.model.function is not None


def dataset(
    config: Config,
    split: Split,
    group: AbstractGroup = ALONE,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> grain.IterDataset:
    """This process's share of the batches of a config.

    Args:
        say: called with lines on which files are read and which are skipped.
    """
    if is_huggingface(config):
        return hf.Task(config).dataset(
            batch_size(config),
            is_training=split == "train",
            group=group,
            say=say,
        )
    data, (names, files) = config.data, _files(config)
    if group.count > 1:
        group.agree({"data of the files": tokens_hash(read_tokens(names, **files))})
    efficiency = config.data_efficiency
    num_epochs = None if efficiency is None else efficiency.num_epochs
    metrics = difficulties(config) if split == "train" else None
    samples = text_dataset(
        names,
        **files,
        sequence_length=config.sequence_length,
        batch_size=batch_size(config),
        seed=data.seed if efficiency is None or metrics is None else efficiency.seed,
        num_epochs=num_epochs if split == "train" else 1,
        # A loss of the user's does not know rows without weight.
        fills=split == "validation" and not is_own(config),
        split=split,
        validation_fraction=data.validation_fraction,
        vocab_size=_model(config).vocab_size,
        process=(group.index, group.count),
        num_microbatches=config.num_microbatches,
        metrics=metrics,
        say=say,
    )
    return paced(config, samples) if split == "train" else samples


def data_digest(config: Config) -> str:
    """A digest of the files of training and validation, and of how they are read."""
    if is_huggingface(config):
        return hf.Task(config).data_digest()
    names, files = _files(config)
    return read_tokens(names, **files).digest()


def _files(config: Config) -> tuple[list[str], dict[str, Any]]:
    """The files of a config, and how their tokens are read, for `read_tokens`."""
    data = config.data
    # Absolute, because `find_files` takes the name "stdlib" for the standard library,
    # even if the user means a folder of that name.
    paths = data.paths
    is_name = isinstance(paths, str)
    names: list[str] = [paths] if is_name else [str(p.absolute()) for p in paths]
    return names, {
        "glob": data.glob,
        "field": data.field,
        "bin_dtype": data.bin_dtype,
        "cache": data.cache or config.run.output / "data",
    }


def learning_rate(config: Config) -> optax.Schedule:
    """The learning rate of a config, as a function of the number of updates done."""
    scale = hf.Task(config).rate_scale() if is_huggingface(config) else None
    return build_schedule(config, scale)


def describing(config: Config) -> Callable[[Any], dict[str, int]]:
    """The function that adds the tokens of a batch to the metrics of its step."""
    return hf.Task.describe if is_huggingface(config) else describe


def _model(config: Config) -> Model:
    """The model section of a config.

    Raises:
        ValueError: there is none.
    """
    if config.model is None or config.model.model_fields_set == {"attention"}:
        raise ValueError(
            "The config has no model section, which zinf train and zinf plan need. "
            "Add one, such as model: {num_layers: 8, num_heads: 5, embed_dim: 320, "
            "max_length: 256}, or one of your own: model: {function: module:make}."
        )
    return config.model


def gpt_config(config: Config) -> GPTConfig:
    """The shape of zinf's model that a config asks for.

    Raises:
        ValueError: the config has no model section.
        NotImplementedError: a function of the user makes the model.
    """
    model = _model(config)
    if model.function is not None:
        raise NotImplementedError(
            "This is for zinf's own model and those of transformers, whose parts it "
            f"knows, and model.function {model.function} makes this one. Use the "
            "engine of zinf.initialize in Python."
        )
    kept = config.kept_tokens
    layers = () if kept is None else kept.layers
    given = model.model_dump(exclude={"name", "huggingface", "function", "attention"})
    return GPTConfig(**given, random_ltd_layers=layers)


def batch_size(config: Config) -> int:
    if config.batch_size is None:
        raise ValueError(
            "The config does not say how many samples a step has. Set train_batch_size "
            "or train_micro_batch_size_per_gpu."
        )
    return config.batch_size


def heading(path: Path | str, config: Config) -> str:
    """The title, and notes on the config, as lines."""
    notes = [f"note: {line}" for line in notices(config)]
    return "\n".join([title(path, config), *notes])


def title(path: Path | str, config: Config) -> str:
    """Config file, number of parameters, tokens per step and dtype, in one line.

    Parameters of a function of the user are counted when it has run; here it is named.
    """
    if is_own(config):
        model = f"the model of {_model(config).function}"
    else:
        model = f"{num_model_parameters(config):,} parameters"
    return (
        f"{path}: {model}, {num_tokens(config):,} tokens a step, {config.compute_dtype}"
    )


def num_model_parameters(config: Config) -> int:
    """Number of the model's parameters, without adapters."""
    if is_huggingface(config):
        return hf.Task(config).model.num_parameters
    return models.num_parameters(gpt_config(config))


def num_tokens(config: Config) -> int:
    """Number of tokens that one step trains on; the most where steps differ."""
    batching = config.dynamic_batching
    if batching is not None and batching.max_tokens is not None:
        return config.num_microbatches * batching.max_tokens
    is_published = is_huggingface(config)
    length = hf.Task(config).length if is_published else config.sequence_length
    return batch_size(config) * length * config.data.traits.num_sequences


def devices(mesh: Mesh) -> str:
    """Number and kind of the devices, in words."""
    return f"{mesh.size} of {mesh.devices.flat[0].device_kind}"
