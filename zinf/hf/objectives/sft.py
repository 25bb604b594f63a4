"""Supervised fine-tuning: each token that has a label is predicted."""

from collections.abc import Callable

from zinf.core.config import Config
from zinf.hf.dataset import Samples
from zinf.hf.model import Model
from zinf.hf.objectives.objective import Objective, Spec, tokens_spec
from zinf.hf.packing import Packed
from zinf.hf.teacher import Distilled


def _spec(config: Config, rows: int, length: int) -> Spec:
    packed = ("segment_ids", "position_ids") * config.data.packing
    return dict.fromkeys(("input_ids", "labels", *packed), tokens_spec(rows, length))


def _rows(samples: Samples, model: Model, config: Config) -> Samples | Packed:
    return Packed(samples) if config.data.packing else samples


def _loss(model: Model, config: Config) -> Callable:
    taught = config.distillation
    if taught is None:
        return model.loss
    return Distilled(model, taught.coefficient, taught.temperature).loss


OBJECTIVE = Objective(
    loss=_loss,
    batch_spec=_spec,
    rows=_rows,
)
