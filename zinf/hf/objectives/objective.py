"""What an objective is: functions from lines to batches, and from those to a loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from zinf.core.config import Config
from zinf.core.rollouts.rollouts import AbstractRollouts
from zinf.hf.dataset import Samples
from zinf.hf.engine import ModelEngine
from zinf.hf.judge import Judge
from zinf.hf.model import Batch, Model, Params, load
from zinf.hf.samples import Tokenizing

Spec = dict[str, jax.ShapeDtypeStruct]
Say = Callable[[str], None]
Applied = Callable[[Callable], Callable]


@cache
def _loaded(name: str, random_ltd_layers: tuple[int, ...]) -> Model:
    return load(name, random_ltd_layers=random_ltd_layers)


def causal_model(config: Config) -> Model:
    """The language model of a config; the same object each time."""
    assert config.model is not None and config.model.huggingface is not None
    kept = config.kept_tokens
    model = _loaded(config.model.huggingface, () if kept is None else kept.layers)
    model.check_whole()
    return model


def samples_in(folder: Path, model: Model, config: Config, **where: Any) -> Samples:
    """Samples of text of a folder."""
    del model, config
    return Samples(folder, **where)


@dataclass(frozen=True)
class Objective:
    """What a model is trained to do. The defaults are those of a causal model.

    Attributes:
        loss: `(model, config) -> loss`, a function of parameters by name, a batch and
            maybe a key.
        batch_spec: `(config, rows, length) -> shapes` of a batch of the longest
            samples.
        rows: `(samples, model, config) -> rows`, of which batches are made.
        samples: `(folder, model, config, **where) -> samples` of a folder, with the
            other arguments of `Samples`.
        model: `config -> model`; the same object each time.
        tokenizing: how lines become samples.
        before_training: `(engine, config, samples, say)`, called before the first step:
            it computes what batches need of the model as it is then, for the samples of
            training and those of files of their own for evaluation.
        settings_of_data: `(config, say) -> keys` of the data section that the config
            leaves open and the files decide.
        trimmed: `(model, batch) -> batch` in one of few shapes, without filling that
            it can do without.
        outputs: `(model, params, batch) -> array`, of which evaluations measure more
            than the loss.
        measures: `(outputs, batch) -> values by name`, whose means over the rows of an
            evaluation join its metrics.
        has_aux: the loss returns `(loss, aux)`.
        drawing: for batches that the model in training draws: how they are made.
        asks: `(apply, model, applied, config) -> what` makes batches of a step from
            those of rows, by what the model says of them; `apply` is that of the
            engine, and `applied` makes a function of the engine's parameters of one of
            the model's.
    """

    loss: Callable[[Model, Config], Callable]
    batch_spec: Callable[[Config, int, int], Spec]
    rows: Callable[[Samples, Model, Config], grain.sources.RandomAccessDataSource]
    samples: Callable[..., Samples] = samples_in
    model: Callable[[Config], Model] = causal_model
    tokenizing: type[Tokenizing] = Tokenizing
    before_training: (
        Callable[[ModelEngine, Config, Sequence[Samples], Say], None] | None
    ) = None
    settings_of_data: Callable[[Config, Say], Mapping[str, Any]] | None = None
    trimmed: Callable[[Model, Any], Any] | None = None
    outputs: Callable[[Model, Params, Batch], jax.Array] | None = None
    measures: (
        Callable[[np.ndarray, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
        | None
    ) = None
    has_aux: bool = False
    drawing: "Drawing | None" = None
    asks: "Callable[[Callable, Model, Applied, Config], AbstractAsked] | None" = None


class AbstractAsked(ABC):
    """Makes batches of a step by asking the model in training before the step."""

    @abstractmethod
    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch of a step from that of rows."""

    @abstractmethod
    def told(self, metrics: dict[str, Any]) -> None:
        """Add what was found of the last batch to the metrics of its step."""


@dataclass(frozen=True)
class Drawing:
    """How batches are made that the model in training draws.

    Attributes:
        kind: of rollouts.
        dataset: `(model, config) -> rollouts`, which an engine draws later.
        num_samples: `(model, config) -> samples` of an epoch.
        drawn_at_once: `config -> completions` that are drawn at once.
        by: `(rollouts, engine, config) -> rollouts` that the engine draws.
        asked: `model -> functions` of parameters and rows, by what they are, that the
            model in training computes beside log-probabilities.
        digests: `config -> digests` of other files that decide the numbers of a run.
        has_copy: `config -> whether` the reference is a second copy of the model.
        judges: `config -> reward models`, which are not opened.
        teacher: `(policy, config) -> the model` that says of each token how likely it
            is, which is not opened; None: there is none.
    """

    kind: type[AbstractRollouts]
    dataset: Callable[[Model, Config], AbstractRollouts]
    num_samples: Callable[[Model, Config], int]
    drawn_at_once: Callable[[Config], int]
    by: Callable[[Any, ModelEngine, Config], AbstractRollouts]
    asked: Callable[[Any], Mapping[str, Callable]]
    digests: Callable[[Config], Mapping[str, str]]
    has_copy: Callable[[Config], bool]
    judges: Callable[[Config], tuple[Judge, ...]]
    teacher: Callable[[Model, Config], Model | None]


def tokens_spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)
