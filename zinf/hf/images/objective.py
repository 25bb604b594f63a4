"""Objectives of answers and of preferences, on conversations with images."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zinf.core.config import Config
from zinf.core.config.schema import WITH_IMAGES
from zinf.hf.adapter import read_adapter
from zinf.hf.batch import by_sequence
from zinf.hf.dataset import samples_of
from zinf.hf.images.kind import bucket_of
from zinf.hf.images.model import (
    MULTIMODAL,
    PIXELS,
    ImageModel,
    load_head_with_images,
    load_with_images,
    room_of,
)
from zinf.hf.images.prompts import pieces_of
from zinf.hf.images.samples import (
    ImageLabelledTokenizing,
    ImagePairTokenizing,
    ImageRatedTokenizing,
    ImageSamples,
    ImageTokenizing,
    most_pieces,
)
from zinf.hf.model import Model
from zinf.hf.objectives.from_rewards import prompts_of
from zinf.hf.objectives.kto import LabelledTokenizing
from zinf.hf.objectives.objective import Objective, Say, Spec
from zinf.hf.objectives.reward import LABELS, RatedTokenizing
from zinf.hf.pairs import PairTokenizing
from zinf.hf.records import has_images, records
from zinf.hf.samples import Tokenizing

TOKENIZING: Mapping[type[Tokenizing], type[ImageTokenizing]] = {
    Tokenizing: ImageTokenizing,
    PairTokenizing: ImagePairTokenizing,
    RatedTokenizing: ImageRatedTokenizing,
    LabelledTokenizing: ImageLabelledTokenizing,
}


@cache
def with_images(objective: Objective) -> Objective:
    """An objective as it is of lines with images."""
    is_rated = objective.tokenizing is RatedTokenizing
    model = _scoring_model if is_rated else image_model

    def batch_spec(config: Config, rows: int, length: int) -> Spec:
        text = objective.batch_spec(config, rows, length)
        *lead, _ = text["input_ids"].shape
        found = model(config)
        room = room_of(found, config.data.images)
        more = found.kind.specs(prod(lead), room, length)
        return text | {
            name: jax.ShapeDtypeStruct((*lead, *x.shape[1:]), x.dtype)
            for name, x in more.items()
        }

    return replace(
        objective,
        batch_spec=batch_spec,
        samples=_samples,
        model=model,
        tokenizing=TOKENIZING[objective.tokenizing],
        trimmed=trimmed,
    )


@cache
def _loaded(name: str, trains_tower: bool, multimodal: bool) -> ImageModel:
    rest = {"trains_tower": trains_tower, "multimodal_attention": multimodal}
    return load_with_images(name, **rest)


def image_model(config: Config) -> ImageModel:
    """The model of a config; the same object each time."""
    assert config.model is not None and config.model.huggingface is not None
    is_frozen = config.model.freeze_vision_tower
    adapter, is_apart = config.adapter, config.model.multimodal_attention
    if adapter is not None and adapter.begin_from is not None:
        saved = read_adapter(adapter.begin_from)
        is_apart |= saved is not None and bool(saved.own_settings.get(MULTIMODAL))
    rest = not is_frozen, is_apart
    model = _loaded(config.model.huggingface, *rest)
    model.check_whole()
    return model


@cache
def _loaded_head(name: str, trains_tower: bool, seed: int) -> ImageModel:
    rest = {"trains_tower": trains_tower, "seed": seed}
    return load_head_with_images(name, labels=LABELS, **rest)


def _scoring_model(config: Config) -> ImageModel:
    """The reward model of a config; the same object each time."""
    assert config.model is not None and config.model.huggingface is not None
    is_frozen = config.model.freeze_vision_tower
    return _loaded_head(config.model.huggingface, not is_frozen, config.run.seed)


def _samples(folder: Path, model: Model, config: Config, **where: Any) -> ImageSamples:
    assert isinstance(model, ImageModel)
    return ImageSamples(folder, model, room=room_of(model, config.data.images), **where)


def check_settings(config: Config, reason: str) -> None:
    """Refuse settings that are about images where a model reads text alone.

    Args:
        reason: why it reads text alone, for the message.

    Raises:
        ValueError: there is one.
    """
    for key in WITH_IMAGES:
        if getattr(config.model, key, False):
            option = f"--{key.replace('_', '-')}"
            raise ValueError(
                f"model.{key} ({option}) is set, and {reason}. Leave it out, or give "
                "images: in lines, and in a config with data.images too."
            )


def check_lines(config: Config) -> None:
    """Refuse settings that are about images, if no line of the files has one.

    Raises:
        FileNotFoundError, ValueError: see above, or a file cannot be read.
    """
    is_given = any(getattr(config.model, key, False) for key in WITH_IMAGES)
    if is_given and not _any_images(config):
        check_settings(config, "no line has images")


def _any_images(config: Config) -> bool:
    """Whether a line of the files has images."""
    data = config.data
    if isinstance(data.paths, str):
        return False
    paths = [*data.paths, *(data.evaluation_paths or ())]
    return any(has_images(line) for path in paths for line, _ in records(path))


def images_in_files(objective: Objective, config: Config, say: Say) -> dict[str, Any]:
    """The tiles or patches of the sample with the most of them, if lines have images.

    Args:
        objective: as it is of lines without images.

    Returns:
        keys of the data section.

    Raises:
        NotImplementedError: they have, and zinf reads none with this architecture.
        FileNotFoundError, ValueError: a file or a line is wrong.
    """
    if not _any_images(config):
        check_settings(config, "no line has images")
        return {}
    data = config.data
    splits = [data.paths, data.evaluation_paths or ()]
    found, seeing = [], with_images(objective)
    if objective.drawing is not None:
        model = image_model(config)
        return {"images": max(pieces_of(model, prompts_of(model, config)))}
    for paths, for_evaluation in zip(splits, (False, True), strict=True):
        if paths:
            given = seeing.model(config), config, seeing.tokenizing, say
            found.append(samples_of(*given, for_evaluation=for_evaluation))
    return {"images": max(map(most_pieces, found))}


def trimmed(model: Model, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """A batch with as little filling as the buckets allow.

    All rows of all microbatches keep the same room, which the one with the most images
    decides.
    """
    assert isinstance(model, ImageModel)
    kind, lead = model.kind, batch["input_ids"].shape[:-1]
    leaves = by_sequence(batch, ("input_ids", *kind.leaves))
    room = leaves[PIXELS].shape[1]
    is_image = leaves.pop("input_ids") == model.image_token
    needed = int(kind.num_pieces(np.count_nonzero(is_image, axis=1)).max())
    bucket = bucket_of(needed, room, kind.unit)
    if bucket == room:
        return batch
    cut = kind.cut(leaves, bucket)
    return {**batch, **{n: x.reshape(*lead, *x.shape[1:]) for n, x in cut.items()}}
