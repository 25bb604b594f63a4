"""Pairs of answers, one chosen and one rejected: as samples, rows and probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.objectives import OBJECTIVES
from zinf.core.problem.weighted import Weighted
from zinf.hf.batch import IGNORED, by_sequence
from zinf.hf.dataset import Samples
from zinf.hf.model import Batch, Model, Params
from zinf.hf.records import given_images, tools_of
from zinf.hf.samples import DROPPED, Reading, Tokenizing

SIDES = ("chosen", "rejected")
ANSWER_KEYS = ("input_ids", "labels")
CHOSEN = "chosen and rejected answers"
PREFERENCES = " or ".join(n for n, x in OBJECTIVES.items() if x.lines == CHOSEN)


@dataclass(frozen=True)
class PairTokenizing(Tokenizing):
    """How lines with `chosen` and `rejected` become two samples each."""

    # Whether labels are of answers alone; a text may then not begin with its answer.
    finds_answers: ClassVar[bool] = True

    def read(self, line: Any, where: str, folder: Path | None = None) -> Reading:
        """The chosen and the rejected sample of a line: both, or none of them.

        Both are texts or messages that follow `prompt`, or whole conversations.

        Raises:
            ValueError: the line has no such fields, or see `Tokenizing.read`.
        """
        if isinstance(line, Mapping):
            line = {key: value for key, value in line.items() if value is not None}
        if not isinstance(line, Mapping) or not line.keys() >= set(SIDES):
            found = ", ".join(map(str, line)) if isinstance(line, Mapping) else line
            raise ValueError(
                f"{where}: with data.objective {PREFERENCES} a line must have prompt, "
                "chosen and rejected, or two conversations chosen and rejected; found "
                f"{found}."
            )
        self.check_kind(line, where)
        one = replace(
            self,
            completion_only=self.finds_answers,
            assistant_only=self.finds_answers and self.assistant_only,
        )
        # Both answers are about the same images.
        shared = {"tools": tools_of(line, where), "images": given_images(line)}
        both = [
            super(PairTokenizing, one).read(
                self._answered(line, side, where) | shared, f"{where}, {side}", folder
            )
            for side in SIDES
        ]
        if not all(reading.samples for reading in both):
            return DROPPED
        is_cut = any(reading.is_cut for reading in both)
        samples, beside = (
            sum((getattr(reading, name) for reading in both), ())
            for name in ("samples", "beside")
        )
        return Reading(samples, is_cut, beside)

    def _answered(
        self, line: Mapping[str, Any], side: str, where: str
    ) -> dict[str, Any]:
        prompt, answer = line.get("prompt"), line[side]
        is_conversation = isinstance(answer, list)
        if is_conversation and isinstance(prompt, list):
            return {"prompt": prompt, "completion": answer}
        if is_conversation:
            return {"messages": answer}
        if prompt is None and not self.finds_answers:
            return {"text": answer}
        if not isinstance(prompt, str):
            raise ValueError(
                f"{where}: {side} is a text, so prompt must be the text before it; "
                f"found {prompt!r:.40}."
            )
        return {"prompt": prompt, "completion": answer}


class Pairs(grain.sources.RandomAccessDataSource):
    """Pairs of samples.

    Args:
        samples: chosen and rejected in turn.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples) // len(SIDES)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The leaves of both samples, such as `input_ids`, int32 (2, length)."""
        both = [self.samples[len(SIDES) * index + side] for side in range(len(SIDES))]
        return {name: np.stack([x[name] for x in both]) for name in both[0]}


def pairs_spec(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of pairs."""
    pairs = jax.ShapeDtypeStruct((rows, len(SIDES), length), np.int32)
    return dict.fromkeys(ANSWER_KEYS, pairs)


def log_probabilities(
    model: Model, params: Params, batch: Batch, *key: jax.Array, train: bool = False
) -> jax.Array:
    """The log-probability of each answer, float32 (pairs, 2)."""
    flat = by_sequence(batch, model.scored_leaves)
    found = model.log_probabilities(params, flat, *key, train=train)
    return found.reshape(-1, len(SIDES))


def token_means(sums: jax.Array, batch: Batch) -> jax.Array:
    """Sums over the tokens of each answer as means, float32 (pairs, 2).

    Args:
        sums: float32 (pairs, 2), such as of `log_probabilities`. That of an answer
            without a label is 0, and so is its mean.
    """
    # The first token is predicted by none.
    num_tokens = (batch["labels"][..., 1:] != IGNORED).sum(-1)
    return sums / jnp.maximum(num_tokens, 1)


def over_pairs(losses: jax.Array, batch: Batch) -> Weighted:
    """The sum of losses (pairs,); the weight is the number of pairs with a label."""
    is_pair = (batch["labels"] != IGNORED).any(axis=(1, 2))
    total = jnp.sum(jnp.where(is_pair, losses, 0.0))
    return Weighted(total, jnp.sum(is_pair.astype(jnp.float32)))
