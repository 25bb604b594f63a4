"""Writes the adapters of a checkpoint, alone or added to the weights beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zinf import hf
from zinf.adapt import MergedTensors, save_adapter
from zinf.cli.problem import adapted_model, is_huggingface
from zinf.core.config import Config
from zinf.core.interchange import export_safetensors
from zinf.core.interchange.tensors import AbstractTensors


def export_adapter(config: Config, tensors: AbstractTensors, output: Path) -> None:
    """Write the adapters alone, as PEFT does.

    Args:
        config: that of the run that made the checkpoint.
        tensors: the parameters of the checkpoint, or their averages.
    """
    adapted = adapted_model(config)
    if is_huggingface(config):
        hf.write_adapter(adapted, tensors, hf.Task(config).model, output)
    else:
        save_adapter(adapted, tensors, output)


def export_merged(
    config: Config,
    tensors: AbstractTensors,
    output: Path,
    names: Mapping[str, str] | None,
    **written: Any,
) -> None:
    """Write the model with the adapters added; one of `transformers` in its own form.

    Args:
        tensors: the parameters of the checkpoint, or their averages.
        names: names of tensors by key path, for zinf's own model.
        written: `dtype` and `max_shard_bytes`; see `export_safetensors`.
    """
    merged = MergedTensors(adapted_model(config), tensors)
    if is_huggingface(config):
        if names is not None:
            raise ValueError(
                "--names is for zinf's own model: one of transformers has its names."
            )
        hf.write_model(merged, hf.Task(config).model, output, **written)
    else:
        export_safetensors(merged, output, names=names, **written)
