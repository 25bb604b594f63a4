"""Direct preference optimization: answers that were chosen against rejected ones.

DPO (https://arxiv.org/abs/2305.18290, equation 7) compares the log-probabilities of the
trained model with those of a reference, which is the model as training begins. The
reference never changes, so its log-probabilities are computed once, and kept in a file.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.problem.weighted import Weighted
from zinf.core.text.complaint import naming
from zinf.data.array_file import read_array
from zinf.hf.batch import IGNORED
from zinf.hf.dataset import Samples
from zinf.hf.engine import ModelEngine
from zinf.hf.model import Batch, Model, Params
from zinf.hf.records import tools_of
from zinf.hf.samples import DROPPED, Reading, Tokenizing

SIDES = ("chosen", "rejected")
ANSWER_KEYS = ("input_ids", "labels")
# Log-probabilities of equal weights that two machines compute in 16 bits differ by
# less: terms are off by 2**-8 of a logit, either way. More costs a pass, and no error.
ROUNDING = {"rtol": 2.0**-10, "atol": 2.0**-5}


@dataclass(frozen=True)
class Preference:
    """The loss of DPO for a model.

    Attributes:
        beta: how strongly the model is kept near the reference; 0.1 is usual.
    """

    model: Model
    beta: float = 0.1

    def loss(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        """-log sigmoid(beta * (gain of chosen - gain of rejected)), summed over pairs.

        The weight is the number of pairs with a label. A gain is the log-probability of
        an answer less that of the reference.

        Args:
            batch: `input_ids` and `labels` (pairs, 2, tokens), chosen first, and
                `reference` (pairs, 2), what `log_probabilities` gave for the reference.
        """
        found = self.log_probabilities(params, batch, *key, train=train)
        gains = found - batch["reference"]
        losses = jax.nn.softplus(self.beta * (gains[:, 1] - gains[:, 0]))
        is_pair = (batch["labels"] != IGNORED).any(axis=(1, 2))
        total = jnp.sum(jnp.where(is_pair, losses, 0.0))
        return Weighted(total, jnp.sum(is_pair.astype(jnp.float32)))

    def log_probabilities(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = False
    ) -> jax.Array:
        """The log-probability of each answer, float32 (pairs, 2)."""
        flat = {n: batch[n].reshape(-1, batch[n].shape[-1]) for n in ANSWER_KEYS}
        found = self.model.log_probabilities(params, flat, *key, train=train)
        return found.reshape(-1, len(SIDES))


@dataclass(frozen=True)
class PairTokenizing(Tokenizing):
    """How lines with `chosen` and `rejected` become two samples each."""

    def read(self, line: Any, where: str) -> Reading:
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
                f"{where}: with data.objective dpo a line must have prompt, chosen and "
                f"rejected, or two conversations chosen and rejected; found {found}."
            )
        one = replace(self, completion_only=True)
        tools = {"tools": tools_of(line, where)}
        both = [
            Tokenizing.read(
                one, _answered(line, side, where) | tools, f"{where}, {side}"
            )
            for side in SIDES
        ]
        if not all(reading.samples for reading in both):
            return DROPPED
        chosen, rejected = (reading.samples[0] for reading in both)
        return Reading((chosen, rejected), any(reading.is_cut for reading in both))


def _answered(line: Mapping[str, Any], side: str, where: str) -> dict[str, Any]:
    prompt, answer = line.get("prompt"), line[side]
    is_conversation = isinstance(answer, list)
    if is_conversation and isinstance(prompt, list):
        return {"prompt": prompt, "completion": answer}
    if is_conversation:
        return {"messages": answer}
    if not isinstance(prompt, str):
        raise ValueError(
            f"{where}: {side} is a text, so prompt must be the text before it; found "
            f"{prompt!r:.40}."
        )
    return {"prompt": prompt, "completion": answer}


class Pairs(grain.sources.RandomAccessDataSource):
    """Pairs of samples, with the log-probabilities of the reference.

    Args:
        samples: chosen and rejected in turn.
        reference: the file that `write_reference` writes, before the first pair is
            read.
        first: the number of the first pair in that file.
    """

    def __init__(self, samples: Samples, reference: Path, first: int) -> None:
        self._samples, self._path, self._first = samples, reference, first
        self._reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._samples) // len(SIDES)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids` and `labels`, int32 (2, length); `reference`, float32 (2,)."""
        if self._reference is None:
            self._reference = read_array(self._path)
        return self.answers(index) | {"reference": self._reference[self._first + index]}

    def answers(self, index: int) -> dict[str, np.ndarray]:
        """A pair without the reference."""
        both = [self._samples[len(SIDES) * index + side] for side in range(len(SIDES))]
        return {name: np.stack([x[name] for x in both]) for name in ANSWER_KEYS}


def write_reference(
    engine: ModelEngine,
    preference: Preference,
    pairs: Pairs,
    path: Path,
    *,
    batch_size: int,
) -> None:
    """Compute the reference's log-probabilities of all pairs, and write them to a file.

    The engine has taken no step: the reference is its model as it is now. The passes
    run forward alone, with weights streamed from where they rest.

    Args:
        batch_size: pairs of a pass.
    """
    found = list(_passes(engine, preference, pairs, batch_size))
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with naming(partial), partial.open("wb") as file:
        np.save(file, np.concatenate(found)[: len(pairs)])
    partial.replace(path)


def is_reference(
    engine: ModelEngine,
    preference: Preference,
    pairs: Pairs,
    path: Path,
    *,
    batch_size: int,
) -> bool:
    """Whether a file of `write_reference` is of the engine's model, by one pass.

    That is so if the losses of the first pairs are ln 2, within rounding: on another
    machine sums of the same terms may differ.
    """
    kept = read_array(path)
    if kept.shape != (len(pairs), len(SIDES)):
        return False
    found = next(_passes(engine, preference, pairs, batch_size))[: len(kept)]
    return np.allclose(found, kept[: len(found)], **ROUNDING)


def _passes(
    engine: ModelEngine, preference: Preference, pairs: Pairs, batch_size: int
) -> Iterator[np.ndarray]:
    """Log-probabilities of so many pairs after another; the last pass may repeat."""
    assert engine.num_steps == 0, "the reference is the model before the first step"
    function = _forward(engine, preference)
    for start in range(0, len(pairs), batch_size):
        # The last pass has the shape of the others: it repeats the last pair.
        numbers = np.minimum(np.arange(start, start + batch_size), len(pairs) - 1)
        rows = [pairs.answers(int(number)) for number in numbers]
        batch = {name: np.stack([row[name] for row in rows]) for name in ANSWER_KEYS}
        yield engine.apply(function, batch)


def _forward(engine: ModelEngine, preference: Preference) -> Callable:
    function = preference.log_probabilities
    return function if engine.adapted is None else engine.adapted.applied(function)
