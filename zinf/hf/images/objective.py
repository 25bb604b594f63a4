"""Supervised fine-tuning on conversations with images."""

from collections.abc import Mapping
from functools import cache

import numpy as np

from zinf.core.config import Config
from zinf.hf.dataset import Samples
from zinf.hf.images.kind import bucket_of
from zinf.hf.images.model import PIXELS, ImageModel, load_with_images
from zinf.hf.images.samples import ImageRows, ImageTokenizing
from zinf.hf.model import Model
from zinf.hf.objectives.objective import Objective, Spec, tokens_spec


@cache
def _loaded(name: str, trains_tower: bool) -> ImageModel:
    return load_with_images(name, trains_tower=trains_tower)


def image_model(config: Config) -> ImageModel:
    """The model of a config; the same object each time."""
    assert config.model is not None and config.model.huggingface is not None
    is_frozen = config.model.freeze_vision_tower
    model = _loaded(config.model.huggingface, not is_frozen)
    model.check_whole()
    return model


def room_of(model: ImageModel, config: Config) -> int:
    """The pieces that the rows of the largest batch have room for.

    At least one, so that batches without images have the leaves of others.
    """
    unit = model.kind.unit
    return max(unit, -(-(config.data.images or 0) // unit) * unit)


def _spec(config: Config, rows: int, length: int) -> Spec:
    model = image_model(config)
    text = dict.fromkeys(("input_ids", "labels"), tokens_spec(rows, length))
    return text | model.kind.specs(rows, room_of(model, config), length)


def _rows(samples: Samples, model: Model, config: Config) -> ImageRows:
    assert isinstance(model, ImageModel)
    return ImageRows(samples, model, room_of(model, config))


def trimmed(model: Model, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """A batch with as little filling as the buckets allow.

    All rows of all microbatches keep the same room, which the one with the most images
    decides.
    """
    assert isinstance(model, ImageModel)
    kind, room = model.kind, batch[PIXELS].shape[1]
    is_image = batch["input_ids"] == model.image_token
    needed = int(kind.num_pieces(np.count_nonzero(is_image, axis=1)).max())
    bucket = bucket_of(needed, room, kind.unit)
    return batch if bucket == room else kind.cut(batch, bucket)


OBJECTIVE = Objective(
    loss=lambda model, config: model.loss,
    batch_spec=_spec,
    rows=_rows,
    model=image_model,
    tokenizing=ImageTokenizing,
    trimmed=trimmed,
)
