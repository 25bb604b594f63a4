"""Kahneman-Tversky optimization: answers that are desirable or not, each by itself.

KTO (https://arxiv.org/abs/2402.01306, equations 7 and 8) makes desirable answers
likelier than the reference has them, beyond z, and others less likely. z estimates how
far the model is from the reference: it is the mean gain of answers behind prompts that
are not theirs. It is that of all rows of a step, computed by a pass before the step, so
that it does not depend on microbatches or devices. In TRL it is that of a microbatch.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.config import Config
from zinf.core.problem.weighted import Weighted
from zinf.data.array_file import read_array
from zinf.hf.batch import IGNORED
from zinf.hf.dataset import Samples
from zinf.hf.model import Batch, Model, Params
from zinf.hf.objectives import dpo
from zinf.hf.objectives.objective import AbstractAsked, Applied, Spec, tokens_spec
from zinf.hf.pairs import ANSWER_KEYS, SIDES
from zinf.hf.records import given_images
from zinf.hf.samples import DROPPED, Reading, Tokenizing

KEYS = ("prompt", "completion", "label")
OTHER = "other_completion"
DESIRABLE = "desirable.npy"


@dataclass(frozen=True)
class LabelledTokenizing(Tokenizing):
    """How lines with `prompt`, `completion` and `label` become two samples each.

    They are the prompt with its completion, and with that of the nearest line before of
    another prompt; the first lines have the first completion after them. A prompt is
    its text and its images.
    """

    @classmethod
    def records(cls, path: Path) -> Iterator[tuple[Any, ...]]:
        waiting: list[tuple[Any, ...]] = []
        before: Any = None
        # A completion of another prompt than that of the line before.
        other: Any = None
        for line, *where in super().records(path):
            if not _is_labelled(line):
                yield line, *where  # `read` refuses it.
                continue
            is_new = before is not None and _prompt_of(line) != _prompt_of(before)
            if is_new:
                other = before["completion"]
                for first, *place in waiting:
                    yield first | {OTHER: line["completion"]}, *place
                waiting.clear()
            if other is None:
                waiting.append((line, *where))
            else:
                yield line | {OTHER: other}, *where
            before = line
        yield from waiting

    def read(self, line: Any, where: str, folder: Path | None = None) -> Reading:
        """The sample of a line, and that of its prompt with another completion.

        Raises:
            ValueError: the line has no such fields, all lines have one prompt, or see
                `Tokenizing.read`.
        """
        if not _is_labelled(line):
            found = ", ".join(map(str, line)) if isinstance(line, Mapping) else line
            raise ValueError(
                f"{where}: with data.objective kto a line must have prompt, completion "
                f"and label, which is true or false; found {found}."
            )
        if OTHER not in line:
            raise ValueError(
                f"{where}: all lines of the file have this prompt, and kto compares "
                "with completions of others. Add lines of other prompts."
            )
        one = replace(self, completion_only=True)
        shared = {name: line[name] for name in ("prompt", "tools") if name in line}
        shared |= {"images": given_images(line)}
        own = {**shared, "completion": line["completion"]}
        reading = super(LabelledTokenizing, one).read(own, where, folder)
        # What it is cut to is enough for an estimate.
        one = replace(one, too_long="truncate")
        other = {**shared, "completion": line[OTHER]}
        where = f"{where}, with the completion of another line"
        mismatched = super(LabelledTokenizing, one).read(other, where, folder)
        if not (reading.samples and mismatched.samples):
            return DROPPED
        samples = (*reading.samples, *mismatched.samples)
        beside = (*reading.beside, *mismatched.beside, line["label"])
        return Reading(samples, reading.is_cut, beside)

    @contextmanager
    def beside(self, folder: Path) -> Generator[Callable[[Any], None], None, None]:
        labels: list[bool] = []
        with super().beside(folder) as keep:

            def keep_label(reading: Reading) -> None:
                keep(replace(reading, beside=reading.beside[:-1]))
                labels.extend(reading.beside[-1:])

            yield keep_label
        np.save(folder / DESIRABLE, np.array(labels, bool))


def _is_labelled(line: Any) -> bool:
    if not isinstance(line, Mapping) or not line.keys() >= set(KEYS):
        return False
    return isinstance(line["label"], bool)


def _prompt_of(line: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    return line["prompt"], given_images(line)


class Labelled(dpo.Referenced):
    """Samples, each with its mismatched one, the reference and its label.

    Args:
        samples: of `LabelledTokenizing`: matched and mismatched in turn.
    """

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids` and `labels`, int32 (2, length), the mismatched sample second.

        Also `reference`, float32 (2,), and `desirable`, float32 (): 1 or 0.
        """
        number = self.samples.first // len(SIDES) + index
        is_desirable = np.array(self._desirable[number], np.float32)
        return super().__getitem__(index) | {"desirable": is_desirable}

    @cached_property
    def _desirable(self) -> np.ndarray:
        return read_array(self.samples.folder / DESIRABLE)


def kto_losses(
    gains: jax.Array, kl: Any, desirable: jax.Array, config: Config
) -> jax.Array:
    """The loss of each answer, float32 (rows,).

    1 - sigmoid(beta * (gain - z)) of a desirable one, and 1 - sigmoid(beta * (z -
    gain)) of another, each with its weight.

    Args:
        gains: log-probabilities of answers less those of the reference.
        kl: z, at least 0.
        desirable: 1 or 0.
    """
    data = config.data
    signs = 2 * desirable - 1
    weights = jnp.where(desirable > 0, data.desirable_weight, data.undesirable_weight)
    return weights * jax.nn.sigmoid(-data.beta * signs * (gains - kl))


def _loss(model: Model, config: Config) -> Callable:
    def loss(
        params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        answers = {name: batch[name] for name in model.scored_leaves}
        found = model.log_probabilities(params, answers, *key, train=train)
        gains = found - batch["reference"]
        losses = kto_losses(gains, batch["kl"], batch["desirable"], config)
        is_row = _has_labels(batch)
        total = jnp.sum(jnp.where(is_row, losses, 0.0))
        return Weighted(total, jnp.sum(is_row.astype(jnp.float32)))

    return loss


def _has_labels(batch: Batch) -> jax.Array:
    return (batch["labels"] != IGNORED).any(axis=-1)


@dataclass(frozen=True)
class _Gains:
    """The gains of mismatched answers, and which rows count, float32 (rows, 2)."""

    model: Model

    def __call__(self, params: Params, batch: Batch) -> jax.Array:
        answers = {name: batch[name] for name in self.model.scored_leaves}
        gains = self.model.log_probabilities(params, answers) - batch["reference"]
        counts = _has_labels(batch)
        return jnp.stack([jnp.where(counts, gains, 0.0), counts], axis=-1)


class _Asked(AbstractAsked):
    """Turns rows into batches of a step: an engine says what z is.

    Args:
        apply: that of the engine, with the weights that are trained or evaluated.
        applied: from a function of the model's parameters to one of the engine's.

    Attributes:
        kl: z of the last batch.
    """

    def __init__(
        self,
        apply: Callable,
        model: Model,
        applied: Applied,
        config: Config,
    ) -> None:
        self._apply, self._function = apply, applied(_Gains(model))
        self._leaves = (*model.scored_leaves, "reference")
        self._count = config.num_microbatches
        self.kl = 0.0

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        own, other = (
            {n: batch[n][:, side] for n in self._leaves} for side in range(len(SIDES))
        )
        how = {"num_microbatches": self._count}
        found = self._apply(self._function, other, **how)
        total, count = found.sum(0, dtype=np.float64)
        self.kl = max(0.0, float(total / max(1.0, count)))
        kl = np.full(len(batch["desirable"]), self.kl, np.float32)
        return {**own, "desirable": batch["desirable"], "kl": kl}

    def told(self, metrics: dict[str, Any]) -> None:
        metrics["kl"] = self.kl


def _spec(config: Config, rows: int, length: int) -> Spec:
    numbers = jax.ShapeDtypeStruct((rows,), np.float32)
    answers = dict.fromkeys(ANSWER_KEYS, tokens_spec(rows, length))
    return answers | dict.fromkeys(("reference", "desirable", "kl"), numbers)


def _rows(samples: Samples, model: Model, config: Config) -> Labelled:
    return Labelled(samples, dpo.reference_file(samples.folder, model, config))


OBJECTIVE = replace(
    dpo.OBJECTIVE,
    loss=_loss,
    batch_spec=_spec,
    rows=_rows,
    tokenizing=LabelledTokenizing,
    asks=_Asked,
)
