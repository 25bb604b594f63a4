"""Reward models: a score for each answer, higher for chosen than for rejected ones.

The model of Bradley and Terry, https://arxiv.org/abs/2203.02155, equation 1: the
probability that an answer is chosen is the sigmoid of the difference of the scores. A
line may have a `margin`, by which the scores should differ at least
(https://arxiv.org/abs/2307.09288, section 3.2.2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.config import Config
from zinf.core.problem.weighted import Weighted
from zinf.hf.batch import IGNORED, by_sequence
from zinf.hf.heads import HeadModel, load_head
from zinf.hf.model import Batch, Model, Params
from zinf.hf.objectives.objective import Objective, Spec, tokens_spec
from zinf.hf.pairs import SIDES, Pairs, PairTokenizing
from zinf.hf.samples import Reading

LABELS = ("score",)
TEXTS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class RatedTokenizing(PairTokenizing):
    """How lines with `chosen`, `rejected` and maybe a `margin` become two samples.

    The label of each sample's last token is the margin, as the bits of a float32.
    """

    # All of a text is scored, so no template has to show where an answer begins.
    finds_answers: ClassVar[bool] = False

    def read(self, line: Any, where: str, folder: Path | None = None) -> Reading:
        """The chosen and the rejected sample of a line: both, or none of them.

        Raises:
            ValueError: the margin is no finite number, or see `PairTokenizing.read`.
        """
        reading = super().read(line, where, folder)
        margin = line.get("margin")
        margin = 0.0 if margin is None else margin
        is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
        if not is_number or not isfinite(margin):
            raise ValueError(
                f"{where}: margin is {margin!r:.40}; it must be a finite number, by "
                "which the scores of chosen and rejected should differ."
            )
        bits = int(np.float32(margin).view(np.int32))
        samples = (
            (ids, [*[IGNORED] * (len(ids) - 1), bits]) for ids, _ in reading.samples
        )
        return replace(reading, samples=tuple(samples))


class Rated(Pairs):
    """Pairs of answers with the margin between their scores.

    Args:
        samples: of `RatedTokenizing`, chosen and rejected in turn.
    """

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """As `Pairs`, but for labels; `attention_mask`, int32 (2, length); and numbers.

        Those are `margins`, float32, and `labels`, int32: 0, the side that is chosen.
        """
        row = super().__getitem__(index)
        numbers = [len(SIDES) * index + side for side in range(len(SIDES))]
        lengths = np.array([[self.samples.num_tokens(number)] for number in numbers])
        mask = np.arange(row["input_ids"].shape[1]) < lengths
        _, labels = self.samples.tokens(numbers[0])
        return row | {
            "attention_mask": mask.astype(np.int32),
            "margins": labels[-1:].view(np.float32)[0],
            "labels": np.zeros((), np.int32),
        }


def scores(
    model: Model, params: Params, batch: Batch, *key: jax.Array, train: bool = False
) -> jax.Array:
    """The score of each answer, float32 (pairs, 2)."""
    flat = by_sequence(batch, (*TEXTS, *model.image_leaves))
    found = model.logits(params, flat, *key, train=train)
    return found.astype(jnp.float32).reshape(-1, len(SIDES))


def rated_losses(
    scores: jax.Array, margins: jax.Array, center_rewards_coefficient: float
) -> jax.Array:
    """The loss of each pair, float32 (pairs,).

    -log sigmoid(chosen - rejected - margin), and the square of their sum times a
    coefficient, which keeps scores near 0: https://arxiv.org/abs/2312.09244.

    Args:
        scores: float32 (pairs, 2), chosen first.
        margins: float32 (pairs,).
    """
    chosen, rejected = scores[:, 0], scores[:, 1]
    losses = jax.nn.softplus(rejected - chosen + margins)
    return losses + center_rewards_coefficient * jnp.square(chosen + rejected)


def _loss(model: Model, config: Config) -> Callable:
    coefficient = config.data.center_rewards_coefficient

    def loss(
        params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        found = scores(model, params, batch, *key, train=train)
        losses = rated_losses(found, batch["margins"], coefficient)
        is_pair = batch["labels"] != IGNORED
        total = jnp.sum(jnp.where(is_pair, losses, 0.0))
        return Weighted(total, jnp.sum(is_pair.astype(jnp.float32)))

    return loss


def _measures(found: np.ndarray, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """TRL's metrics of scores (pairs, 2): for each pair that has a label."""
    chosen, rejected = found[batch["labels"] != IGNORED].T
    return {
        "accuracy": chosen > rejected,
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2,
    }


@cache
def _loaded(name: str, seed: int) -> HeadModel:
    return load_head(name, labels=LABELS, seed=seed)


def _model(config: Config) -> HeadModel:
    assert config.model is not None and config.model.huggingface is not None
    return _loaded(config.model.huggingface, config.run.seed)


def _spec(config: Config, rows: int, length: int) -> Spec:
    texts = dict.fromkeys(TEXTS, tokens_spec(rows, len(SIDES), length))
    margins = jax.ShapeDtypeStruct((rows,), np.float32)
    return texts | {"margins": margins, "labels": tokens_spec(rows)}


OBJECTIVE = Objective(
    loss=_loss,
    batch_spec=_spec,
    rows=lambda samples, model, config: Rated(samples),
    model=_model,
    tokenizing=RatedTokenizing,
    outputs=scores,
    measures=_measures,
)
