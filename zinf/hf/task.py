"""The model, data and optimizer of a config whose `model.huggingface` names a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from xxhash import xxh3_128

from zinf.adapt import Adapted
from zinf.core.config import Config
from zinf.core.optim.transforms.factory import build_optimizer
from zinf.data import (
    Bucket,
    TokenBatches,
    make_buckets,
    rate_scale,
)
from zinf.data.configured import difficulties, paced
from zinf.data.filled import Filled
from zinf.distributed import AbstractGroup
from zinf.hf.analysis import about_rows
from zinf.hf.classes import Classified, ClassTokenizing, class_names
from zinf.hf.dataset import (
    Samples,
    batches,
    check_labels,
    content_of,
    num_samples,
    split_of,
    tokenized,
    without_labels,
)
from zinf.hf.engine import ModelEngine, adapted_model, draws, freezing, initialize
from zinf.hf.folder import SMALL_FILES, weights_digest
from zinf.hf.heads import HeadModel, load_head
from zinf.hf.model import IGNORED, Model, load
from zinf.hf.packing import Packed
from zinf.hf.preference import (
    SIDES,
    Pairs,
    PairTokenizing,
    Preference,
    is_reference,
    write_reference,
)
from zinf.hf.samples import Tokenizing

CLASSIFICATION = "classification"
KINDS: dict[str, type[Tokenizing]] = {
    "sft": Tokenizing,
    "dpo": PairTokenizing,
    CLASSIFICATION: ClassTokenizing,
}


@cache
def _loaded(name: str, random_ltd_layers: tuple[int, ...]) -> Model:
    return load(name, random_ltd_layers=random_ltd_layers)


@cache
def _classifier(name: str, labels: tuple[str, ...] | None, seed: int) -> HeadModel:
    return load_head(name, labels=labels, seed=seed)


@dataclass(frozen=True)
class Task:
    """What a config asks to do with a model of `transformers`."""

    config: Config

    @property
    def model(self) -> Model:
        """The model; the same object each time."""
        asked = self.config.model
        assert asked is not None and asked.huggingface is not None
        if self._classifies:
            labels, seed = self.config.data.labels, self.config.run.seed
            return _classifier(asked.huggingface, labels, seed)
        kept = self.config.kept_tokens
        model = _loaded(asked.huggingface, () if kept is None else kept.layers)
        model.check_whole()
        return model

    @property
    def _classifies(self) -> bool:
        return self.config.data.objective == CLASSIFICATION

    @property
    def preference(self) -> Preference | None:
        """The loss of preferences, if that is the objective."""
        data = self.config.data
        if data.objective != "dpo":
            return None
        return Preference(self.model, data.beta)

    @property
    def loss(self) -> Callable:
        """The loss of the objective, as a function of the parameters by name."""
        preference = self.preference
        return self.model.loss if preference is None else preference.loss

    @property
    def length(self) -> int:
        """Tokens of a sample.

        Raises:
            ValueError: they are more than the model was made for.
        """
        length, longest = self.config.sequence_length, self.model.max_length
        if longest is None or length <= longest:
            return length
        if self.config.data.sequence_length is not None:
            raise ValueError(
                f"data.sequence_length is {length:,}, and {self.model.name} was made "
                f"for {longest:,} tokens (max_position_embeddings). Lower it."
            )
        return longest

    def batch_spec(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of this process's part of a batch of the longest samples.

        With dynamic batching, `rows` has no effect.
        """
        if self.config.dynamic_batching is not None:
            (bucket,) = self._buckets([self.length])
            rows = self.config.num_microbatches * bucket.rows
        if self.preference is not None:
            pairs = jax.ShapeDtypeStruct((rows, len(SIDES), self.length), np.int32)
            reference = jax.ShapeDtypeStruct((rows, len(SIDES)), np.float32)
            return {"input_ids": pairs, "labels": pairs, "reference": reference}
        shape = jax.ShapeDtypeStruct((rows, self.length), np.int32)
        if self._classifies:
            classes = jax.ShapeDtypeStruct((rows,), np.int32)
            texts = {"input_ids": shape, "attention_mask": shape}
            return texts | {"labels": classes}
        packed = ("segment_ids", "position_ids") * self.config.data.packing
        return dict.fromkeys(("input_ids", "labels", *packed), shape)

    def arguments(self, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `zinf.initialize` to plan with: parameters of 0."""
        model, config, rng = self.model, self.config, self._rng
        named: dict[str, Any] = {"rng": rng, "batch": self.batch_spec(rows)}
        tx, told = build_optimizer(config), config.told()
        if config.adapter is None:
            return (self.loss, model.zeros, tx, freezing(told, model)), named
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
        return adapted_model(
            self.model,
            self.config.adapter,
            loss=self.loss,
            batch=self.batch_spec(1),
            rng=self._rng,
        )

    @property
    def _rng(self) -> jax.Array | None:
        config = self.config
        return jax.random.key(config.run.seed) if draws(self.model, config) else None

    def engine(self, rows: int, *, mesh: Mesh, group: AbstractGroup) -> ModelEngine:
        """An engine with the weights of the model's files."""
        model, config = self.model, self.config
        data = self.token_batches()
        return initialize(
            model,
            build_optimizer(config, self.rate_scale()),
            config.told(),
            loss=self.loss,
            rng=self._rng,
            batch=self.batch_spec(rows) if data is None else iter(data).whole(),
            mesh=mesh,
            group=group,
        )

    def samples(
        self,
        say: Callable[[str], None] = lambda text: None,
        *,
        for_evaluation: bool = False,
    ) -> Path:
        """The folder of the tokenized samples; made now if it is not there.

        Args:
            for_evaluation: those of `data.evaluation_paths`, if there are any.
        """
        data, model = self.config.data, self.model
        paths = data.paths
        if for_evaluation and data.evaluation_paths is not None:
            paths = data.evaluation_paths
        if isinstance(paths, str):
            raise ValueError(
                "data.paths names no file. To fine-tune, name files of JSON lines "
                "there, with text, prompt and completion, messages, or text and label."
            )
        named: dict[str, Any] = {}
        if isinstance(model, HeadModel):
            named["classes"] = model.labels
        how = KINDS[data.objective](
            model.tokenizer,
            sequence_length=self.length,
            too_long=data.treatment_of_long,
            completion_only=data.completion_only,
            vocab_size=model.vocab_size,
            assistant_only=data.assistant_only,
            **named,
        )
        files = [p for name in SMALL_FILES for p in sorted(model.folder.glob(name))]
        return tokenized(
            paths,
            how,
            tokenizer_files=files,
            cache=data.cache or self.config.run.output / "data",
            say=say,
        )

    def data_digest(self) -> str:
        """A digest of the files that are trained on, in order."""
        paths = self.config.data.paths
        paths = () if isinstance(paths, str) else paths
        return xxh3_128(json.dumps([*map(content_of, paths)]).encode()).hexdigest()

    def labels_of_data(self) -> tuple[str, ...]:
        """Names of the classes that the files have, for objective classification.

        Those of the model, if it was trained as a classifier of no fewer.

        Raises:
            FileNotFoundError, ValueError: see `class_names`.
        """
        model, data = self.model, self.config.data
        assert isinstance(model, HeadModel)
        paths = [] if isinstance(data.paths, str) else [*data.paths]
        return class_names(
            [*paths, *(data.evaluation_paths or ())],
            model.labels if model.is_trained_so else (),
        )

    def steps_of_epochs(
        self, batch_size: int, epochs: float, say: Callable[[str], None]
    ) -> int:
        """Steps in which each sample is used `epochs` times, at least 1."""
        data = self.token_batches(say)
        if data is not None:
            return max(1, data.order.num_batches(epochs))
        return max(1, round(epochs * len(self.rows(say)) / batch_size))

    def _buckets(self, lengths: Sequence[int] | np.ndarray) -> tuple[Bucket, ...]:
        batching = self.config.dynamic_batching
        assert batching is not None and batching.max_tokens is not None
        return make_buckets(
            lengths,
            max_tokens=batching.max_tokens,
            max_buckets=self.config.data.max_buckets,
            min_batch_size=batching.min_batch_size,
            max_batch_size=batching.max_batch_size,
        )

    def token_batches(
        self,
        say: Callable[[str], None] = lambda text: None,
        *,
        process: tuple[int, int] = (0, 1),
    ) -> TokenBatches | None:
        """The batches of training, if they are made by their tokens.

        Raises:
            ValueError: a sample is too long for them; see `make_buckets`.
        """
        config, batching = self.config, self.config.dynamic_batching
        if batching is None:
            return None
        efficiency, rows = config.data_efficiency, self.rows(say)
        assert efficiency is not None and isinstance(rows, Samples)
        order, seed = batching.sequence_picking_order, config.data.seed
        return TokenBatches(
            rows,
            rows.lengths,
            self._buckets(rows.lengths),
            order="seqlen" if order == "seqlen" else "random",
            seed=efficiency.seed if order == "random" else seed,
            process=process,
            num_microbatches=config.num_microbatches,
        )

    def rate_scale(self) -> optax.Schedule | None:
        """What the learning rate of each step is multiplied by; None: by nothing.

        A batch of more rows than `train_batch_size` has a higher rate. Batches are
        known ahead, so the rate is a function of the number of updates done.
        """
        data, batching = self.token_batches(), self.config.dynamic_batching
        if data is None or batching is None or batching.lr_scaling_method == "none":
            return None
        base, method = self.config.batch_size, batching.lr_scaling_method
        assert base is not None, "a step needs a batch size"
        scales = jnp.array(
            [rate_scale(data.num_rows(b), base, method) for b in data.buckets],
            jnp.float32,
        )
        bucket_of = jnp.array(data.order.buckets(self.config.run.steps), jnp.uint16)
        return lambda count: scales[bucket_of[jnp.minimum(count, len(bucket_of) - 1)]]

    def rows(
        self,
        say: Callable[[str], None] = lambda text: None,
        *,
        is_training: bool = True,
    ) -> Samples | Packed | Pairs | Classified:
        """The rows of a split, of which batches are made.

        Raises:
            NotImplementedError: rows would have several samples, and the model cannot
                keep them apart.
        """
        data, tokenizer = self.config.data, self.model.tokenizer
        if data.packing:
            self.model.check_packing()
        folder = self.samples(say, for_evaluation=not is_training)
        fraction, count = data.validation_fraction, num_samples(folder)
        if data.evaluation_paths is not None:
            # All of the files of a split are its own.
            fraction = 0.0 if is_training else 1.0
        each = 1 if self.preference is None else len(SIDES)
        first, last = split_of(count // each, fraction, is_training=is_training)
        ids = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
        if self._classifies:
            ids = self.model.config.pad_token_id, *ids
        padding = next(token for token in ids if token is not None)
        found = Samples(
            folder,
            length=self.length,
            padding=padding,
            first=first * each,
            last=last * each,
        )
        if self.preference is not None:
            return Pairs(found, self._reference_file(folder), first)
        if self._classifies:
            return Classified(found)
        return Packed(found) if data.packing else found

    def before_training(
        self, engine: ModelEngine, batch_size: int, say: Callable[[str], None]
    ) -> None:
        """Compute what batches need of the model as it is before the first step.

        That is the reference of preferences, for all pairs of the files, unless an
        earlier run computed it from equal weights. What that run wrote is compared with
        a pass of this model: the first loss is ln 2, or the file is written anew.
        """
        preference, data = self.preference, self.config.data
        if preference is None:
            return
        evaluates = self.config.run.evaluate_every is not None
        is_apart = evaluates and data.evaluation_paths is not None
        for folder in (self.samples(), *[self.samples(for_evaluation=True)] * is_apart):
            path = self._reference_file(folder)
            found = Samples(
                folder, length=self.length, padding=0, first=0, last=num_samples(folder)
            )
            pairs = Pairs(found, path, 0)
            if path.exists():
                if is_reference(engine, preference, pairs, path, batch_size=batch_size):
                    continue
                say(f"data: {path} is of another model than this one")
            say(f"data: log-probabilities of {len(pairs):,} pairs, once, to {path}")
            write_reference(engine, preference, pairs, path, batch_size=batch_size)

    def _reference_file(self, folder: Path) -> Path:
        """Where the log-probabilities of the pairs in a folder are, for this model.

        It goes by the content of the weights and settings of the model; see
        `sampled_digest`.
        """
        adapter, model = self.config.adapter, self.model
        begin_from = None if adapter is None else adapter.begin_from
        encoding = None if adapter is None else adapter.quantize_base
        places = [model.folder, *([] if begin_from is None else [begin_from])]
        weights = [weights_digest(place) for place in places]
        state = [weights, encoding, self.config.compute_dtype]
        digest = sha256(json.dumps(state).encode()).hexdigest()[:16]
        return folder / f"reference-{digest}.npy"

    @staticmethod
    def describe(batch: Mapping[str, np.ndarray]) -> dict[str, int]:
        """For the metrics: the length of rows, and the tokens trained on, or read.

        Also the tokens of a row that layers keep which drop tokens.
        """
        if "attention_mask" in batch:
            is_counted = batch["attention_mask"]
        else:
            is_counted = batch["labels"][..., 1:] != IGNORED
        length = batch["input_ids"].shape[-1]
        return {
            "sequence_length": length,
            "kept_tokens": batch["kept"].shape[2] if "kept" in batch else length,
            "tokens": int(np.count_nonzero(is_counted)),
        }

    def dataset(
        self,
        batch_size: int,
        *,
        is_training: bool,
        group: AbstractGroup,
        say: Callable[[str], None],
    ) -> grain.IterDataset:
        """This process's share of the batches."""
        config, process = self.config, (group.index, group.count)
        data = self.token_batches(say, process=process) if is_training else None
        if data is not None:
            shapes = ", ".join(f"{data.num_rows(b)} x {b.length}" for b in data.buckets)
            say(f"data: batches have {shapes} tokens")
            return data
        rows = self.rows(say, is_training=is_training)
        efficiency, seed, metrics = config.data_efficiency, config.data.seed, None
        drawn = difficulties(config) if is_training else None
        num_epochs = None if efficiency is None else efficiency.num_epochs
        if efficiency is not None and drawn is not None:
            seed = efficiency.seed
            assert isinstance(rows, Samples | Packed), "the config was checked"
            told = about_rows(rows, config.data.validation_fraction)
            metrics = drawn(len(rows), told)
        found = batches(
            rows if is_training else Filled(rows, batch_size, without_labels),
            batch_size=batch_size,
            seed=seed,
            split="train" if is_training else "validation",
            num_epochs=num_epochs if is_training else 1,
            metrics=metrics,
            process=process,
            num_microbatches=config.num_microbatches,
        )
        if not is_training:
            return found
        if config.kept_tokens is not None:
            self.model.check_dropping()
        # Of a batch on several processes, each knows only its own rows.
        check = check_labels if group.count == 1 else None
        return paced(config, found, leaf="input_ids", extra=0, check=check)
