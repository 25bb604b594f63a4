"""Writes a trained model as files that `transformers` loads.

Tensors get the names and the form that they had in the model's files: what was made of
several tensors as it was read is taken apart again, in parts of bounded size.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np

from zinf.adapt import Adapted, MergedTensors, save_adapter
from zinf.adapt.files import CONFIG as ADAPTER_CONFIG
from zinf.checkpoint.saved import Saved
from zinf.core.engine.engine import Engine
from zinf.core.engine.named import MASTER
from zinf.core.interchange.names import listed
from zinf.core.interchange.safetensors_export import MAX_SHARD_BYTES, export_safetensors
from zinf.core.interchange.safetensors_files import INDEX_SUFFIX, SUFFIX
from zinf.core.interchange.sources import EngineTensors
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.sharding import Box
from zinf.hf.adapter import naming_of
from zinf.hf.card import CARD, Run, card_of, write_card
from zinf.hf.completion import SETTINGS
from zinf.hf.engine import ModelEngine
from zinf.hf.exported import ExportedWeights
from zinf.hf.folder import SMALL_FILES
from zinf.hf.model import Model
from zinf.hf.module import CONFIG

logger = logging.getLogger(__name__)
METADATA = {"format": "pt"}


def export(
    engine: ModelEngine,
    directory: Path | str,
    *,
    kind: str = MASTER,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    run: Run | None = None,
    part: str = "",
) -> None:
    """Write the trained model as a folder that `transformers` loads.

    The folder has the weights in safetensors files, config.json, generation settings,
    the tokenizer, if the model has one, and a model card. Adapters are added to the
    weights that they are beside. The folder appears only when it is complete.

    Args:
        directory: absent or empty.
        kind: "master" writes the weights as trained; "ema" their average
            (`zinf.with_ema`). With adapters, those are the average.
        dtype: of the weights; by default the one that they are kept in, which is that
            of the masters if there are any. Values are rounded to the nearest.
        max_shard_bytes: largest sum of tensor bytes in a file.
        run: how the model was trained, for the card.
        part: which model, where several are trained together (`Model.parts`): that of
            these names.

    Raises:
        FileExistsError, StorageError, BudgetExceeded, ValueError: see
            `zinf.interchange.export_safetensors`.
    """
    tensors: AbstractTensors = EngineTensors(engine, kind)
    if engine.adapted is not None:
        tensors = MergedTensors(engine.adapted, tensors)
    model = engine.model.parts[part]
    card = card_of(model.name, adapter=False, run=run, more=model.note)
    written: dict[str, Any] = {"dtype": dtype, "card": card, "part": part}
    written["max_shard_bytes"] = max_shard_bytes
    write_model(tensors, engine.model, directory, **written)


def write_model(
    tensors: AbstractTensors,
    model: Model,
    directory: Path | str,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    card: str | None = None,
    part: str = "",
) -> None:
    """`export` with the parameters by name, such as those of a checkpoint.

    Args:
        card: text of the model card; None: one that names the model.
        part: see `export`.
    """
    tensors, model = _Part(tensors, model, part), model.parts[part]
    kept = dtype or model.dtype

    def beside(folder: Path) -> None:
        save_small_files(model, folder, kept, card=card)

    export_safetensors(
        ExportedWeights(tensors, model.module, model.persistent_buffers()),
        directory,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        names=lambda name: name,
        metadata=METADATA,
        beside=beside,
    )


def export_adapter(
    engine: ModelEngine,
    directory: Path | str,
    *,
    kind: str = MASTER,
    run: Run | None = None,
) -> None:
    """Write the trained adapters alone, as a folder that PEFT loads.

    The tokenizer of the model is beside them, if it has one, with its chat template.
    A tied weight (an embedding that is the output head too) is written under both of
    its names, as PEFT has an adapter for each.

    Args:
        directory: absent or empty. It appears only when it is complete.
        kind, run: see `export`.

    Raises:
        ValueError: the engine trains no adapters, or keeps no average of that `kind`.
        FileExistsError, StorageError: see `zinf.adapt.save_adapter`.
    """
    if engine.adapted is None:
        raise ValueError(
            "This engine trains all weights of the model, so there is no adapter to "
            "write. Use zinf.hf.export, or give the config an adapter section."
        )
    tensors = EngineTensors(engine, kind)
    write_adapter(engine.adapted, tensors, engine.model, directory, run=run)


def write_adapter(
    adapted: Adapted,
    source: Engine | Saved | AbstractTensors,
    model: Model,
    directory: Path | str,
    *,
    run: Run | None = None,
) -> None:
    """`export_adapter` for an engine, a checkpoint or tensors by path."""
    model = model.parts[""]
    adapted = adapted.only(model.specs)
    stacked = [path for path, x in adapted.targets.items() if x.r and x.lead]
    if stacked:
        logger.warning(
            "PEFT would compute wrong logits from this adapter: those of stacked "
            "experts (%s and %d more) have a form of zinf's own. Export the merged "
            "model for other libraries; zinf continues from the adapter with "
            "adapter.begin_from.",
            stacked[0],
            len(stacked) - 1,
        )

    def beside(folder: Path) -> None:
        _save_tokenizer(model, folder)
        about = {"adapter": True, "run": run, "more": model.note}
        write_card(folder, card_of(model.name, **about))

    save_adapter(
        adapted,
        source,
        directory,
        base=model.name,
        task=model.peft_task,
        naming=naming_of(model.module),
        own_settings=model.adapter_settings,
        beside=beside,
    )


def _save_tokenizer(model: Model, folder: Path) -> None:
    """Write the tokenizer so that it needs no config.json: that is of a whole model."""
    try:
        tokenizer = model.tokenizer
    except ValueError as error:
        logger.info("The adapter has no tokenizer beside it: %s", error)
        return
    tokenizer.save_pretrained(folder)


def save_small_files(
    model: Model,
    folder: Path,
    dtype: str,
    quantization: Mapping[str, Any] | None = None,
    *,
    card: str | None = None,
) -> None:
    """Write config.json and a card, and copy what lies beside the weights as it is.

    Args:
        dtype: of the weights.
        quantization: how they are quantized, for config.json.
        card: text of the model card; None: one that names the model.
    """
    write_card(folder, card or card_of(model.name, adapter=False))
    module = model.module
    config = type(model.config).from_dict(model.config.to_dict())
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    config.architectures = [type(module).__name__]
    if quantization is not None:
        config.quantization_config = dict(quantization)
    config.save_pretrained(folder)
    # config.json does not say all of how the model generates and its tokenizer works.
    copied = {
        path.name: path
        for pattern in SMALL_FILES
        for path in sorted(model.folder.glob(pattern))
        if path.is_file()
        and path.name not in (CONFIG, ADAPTER_CONFIG)
        and not path.name.endswith(INDEX_SUFFIX)
    }
    for name, path in copied.items():
        copyfile(path, folder / name)
    if module.can_generate() and SETTINGS not in copied:
        module.generation_config.save_pretrained(folder)
    left = [
        path.name
        for path in sorted(model.folder.iterdir())
        if path.name not in (*copied, CONFIG, CARD)
        and not path.name.endswith((SUFFIX, INDEX_SUFFIX))
    ]
    if left:
        logger.info("Not copied from %s: %s.", model.folder, listed(left))


class _Part(AbstractTensors):
    """The parameters of one of the models that are trained together, by its own names.

    Args:
        part: see `export`.
    """

    def __init__(self, tensors: AbstractTensors, model: Model, part: str) -> None:
        self._tensors, self._prefix = tensors, part
        names = model.parts[part].specs
        self.specs = {name: tensors.specs[part + name] for name in names}

    def block(self, name: str) -> tuple[int, ...]:
        return self._tensors.block(self._prefix + name)

    def read(self, name: str, box: Box) -> np.ndarray:
        return self._tensors.read(self._prefix + name, box)

    def copies_of(self, name: str) -> int:
        return self._tensors.copies_of(self._prefix + name)

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        return self._tensors.holding(nbytes)
