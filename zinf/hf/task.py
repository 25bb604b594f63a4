"""The model, data and optimizer of a config whose `model.huggingface` names a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from zinf.adapt import Adapted
from zinf.config import Config
from zinf.distributed import AbstractGroup
from zinf.hf.dataset import num_samples, sample_batches, tokenized
from zinf.hf.engine import ModelEngine, adapted_model, draws, initialize
from zinf.hf.folder import SMALL_FILES
from zinf.hf.model import IGNORED, Model, load
from zinf.hf.samples import Tokenizing
from zinf.optim.factory import build_optimizer


@cache
def _loaded(name: str) -> Model:
    return load(name)


@dataclass(frozen=True)
class Task:
    """What a config asks to do with a model of `transformers`."""

    config: Config

    @property
    def model(self) -> Model:
        """The model; the same object each time."""
        asked = self.config.model
        assert asked is not None and asked.huggingface is not None
        return _loaded(asked.huggingface)

    @property
    def length(self) -> int:
        """Tokens of a sample.

        Raises:
            ValueError: they are more than the model was made for.
        """
        length, longest = self.config.sequence_length, self.model.max_length
        if longest is not None and length > longest:
            raise ValueError(
                f"data.sequence_length is {length:,}, and {self.model.name} was made "
                f"for {longest:,} tokens (max_position_embeddings). Lower it."
            )
        return length

    def batch_spec(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of this process's part of a batch."""
        shape = jax.ShapeDtypeStruct((rows, self.length), np.int32)
        return {"input_ids": shape, "labels": shape}

    def arguments(self, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `zinf.initialize` to plan with: parameters of 0."""
        model, config, rng = self.model, self.config, self._rng
        named: dict[str, Any] = {"rng": rng, "batch": self.batch_spec(rows)}
        tx, told = build_optimizer(config), config.told()
        if config.adapter is None:
            return (model.loss, model.zeros, tx, told), named
        adapted = self.adapted()
        named["eval_loss_fn"] = adapted.eval_loss_fn
        return (adapted.loss_fn, adapted.params, tx, adapted.config(told)), named

    def adapted(self) -> Adapted:
        """The model with the adapters of the config, of which only shapes are known.

        Raises:
            ValueError: the config has no adapter section, or see `adapted_model`.
        """
        if self.config.adapter is None:
            raise ValueError("The config has no adapter section.")
        return adapted_model(self.model, self.config.adapter, rng=self._rng)

    @property
    def _rng(self) -> jax.Array | None:
        config = self.config
        return jax.random.key(config.run.seed) if draws(self.model, config) else None

    def engine(self, rows: int, *, mesh: Mesh, group: AbstractGroup) -> ModelEngine:
        """An engine with the weights of the model's files."""
        model, config = self.model, self.config
        return initialize(
            model,
            build_optimizer(config),
            config.told(),
            rng=self._rng,
            batch=self.batch_spec(rows),
            mesh=mesh,
            group=group,
        )

    def samples(self, say: Callable[[str], None] = lambda text: None) -> Path:
        """The folder of the tokenized samples; made now if it is not there."""
        data, model = self.config.data, self.model
        if isinstance(data.paths, str):
            raise ValueError(
                "data.paths names no file. To fine-tune, name files of JSON lines "
                "there, with text, prompt and completion, or messages."
            )
        how = Tokenizing(
            model.tokenizer,
            sequence_length=self.length,
            truncates=data.truncate,
            completion_only=data.completion_only,
            vocab_size=model.vocab_size,
        )
        files = [p for name in SMALL_FILES for p in sorted(model.folder.glob(name))]
        return tokenized(
            data.paths,
            how,
            tokenizer_files=files,
            cache=data.cache or self.config.run.output / "data",
            say=say,
        )

    def steps_of_epochs(
        self, batch_size: int, epochs: float, say: Callable[[str], None]
    ) -> int:
        """Steps in which each sample is used `epochs` times, at least 1."""
        count = num_samples(self.samples(say))
        return max(1, round(epochs * count / batch_size))

    @staticmethod
    def describe(batch: Mapping[str, np.ndarray]) -> dict[str, int]:
        """For the metrics: the tokens of a batch that are trained on."""
        is_trained = batch["labels"][:, 1:] != IGNORED
        return {"tokens": int(np.count_nonzero(is_trained))}

    def dataset(
        self,
        batch_size: int,
        *,
        is_training: bool,
        group: AbstractGroup,
        say: Callable[[str], None],
    ) -> grain.IterDataset:
        """This process's share of the batches."""
        config, tokenizer = self.config, self.model.tokenizer
        schedules = config.lengths, config.kept_tokens, config.data_efficiency
        if any(schedule is not None for schedule in schedules):
            raise NotImplementedError(
                "Schedules of lengths, difficulties and kept tokens are not supported "
                "for model.huggingface yet. Remove curriculum_learning and "
                "data_efficiency."
            )
        ids = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
        return sample_batches(
            self.samples(say),
            length=self.length,
            padding=next(token for token in ids if token is not None),
            batch_size=batch_size,
            seed=config.data.seed,
            is_training=is_training,
            validation_fraction=config.data.validation_fraction,
            process=(group.index, group.count),
            num_microbatches=config.num_microbatches,
        )
