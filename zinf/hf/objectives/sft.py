"""Supervised fine-tuning: each token that has a label is predicted."""

from typing import Any

from zinf.core.config import Config
from zinf.hf.dataset import Samples, samples_of
from zinf.hf.images.objective import image_model
from zinf.hf.images.samples import ImageTokenizing, most_pieces
from zinf.hf.model import Model
from zinf.hf.objectives.objective import Objective, Say, Spec, tokens_spec
from zinf.hf.packing import Packed
from zinf.hf.records import has_images, records


def _spec(config: Config, rows: int, length: int) -> Spec:
    packed = ("segment_ids", "position_ids") * config.data.packing
    return dict.fromkeys(("input_ids", "labels", *packed), tokens_spec(rows, length))


def _rows(samples: Samples, model: Model, config: Config) -> Samples | Packed:
    return Packed(samples) if config.data.packing else samples


def _settings(config: Config, say: Say) -> dict[str, Any]:
    """The tiles or patches of the sample with the most of them, if lines have images.

    Raises:
        NotImplementedError: they have, and zinf reads none with this architecture.
        FileNotFoundError, ValueError: a file or a line is wrong.
    """
    data = config.data
    if isinstance(data.paths, str):
        return {}
    splits = [data.paths, data.evaluation_paths or ()]
    lines = (line for paths in splits for path in paths for line in records(path))
    if not any(has_images(line) for line, _ in lines):
        if config.model is not None and config.model.freeze_vision_tower:
            raise ValueError(
                "model.freeze_vision_tower (--freeze-vision-tower) is set, and no line "
                "has images. Leave it out, or give images."
            )
        return {}
    found = []
    for paths, for_evaluation in zip(splits, (False, True), strict=True):
        if paths:
            how = {"for_evaluation": for_evaluation}
            model = image_model(config)
            found.append(samples_of(model, config, ImageTokenizing, say, **how))
    return {"images": max(map(most_pieces, found))}


OBJECTIVE = Objective(
    loss=lambda model, config: model.loss,
    batch_spec=_spec,
    rows=_rows,
    settings_of_data=_settings,
)
