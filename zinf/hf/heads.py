"""Models of `transformers` with other heads: classifiers, encoder-decoders, vision.

The loss is that of the logits and `labels`, in float32: the module's own would be in
the dtype of its activations. What the labels are says which loss it is.
"""

from collections.abc import Mapping
from copy import copy
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from zinf.core.interchange.names import listed
from zinf.core.problem.cross_entropy import cross_entropy
from zinf.core.problem.weighted import Weighted
from zinf.core.sharding import Box
from zinf.hf.batch import IGNORED, check_tokens
from zinf.hf.folder import find_folder
from zinf.hf.model import Batch, Model, Params
from zinf.hf.module import read_config
from zinf.hf.quantized.packed import Dequantized
from zinf.hf.weights import StoredWeights, spec_of, to_numpy

# The error of modules of `transformers` that need a token of padding.
NO_PADDING = "no padding token is defined"

SEQUENCE_CLASSIFICATION = "AutoModelForSequenceClassification"
# PEFT's names of the tasks of Auto classes; it has no name for other classes.
PEFT_TASKS = {
    SEQUENCE_CLASSIFICATION: "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
}
# Modules that PEFT trains whole beside adapters of a classifier.
CLASSIFIERS = ("classifier", "score")
# A part of some encoders that a checkpoint of a language model does not have.
POOLER = "pooler"


def load_head(
    path_or_id: str | Path,
    auto_class: str = SEQUENCE_CLASSIFICATION,
    *,
    labels: tuple[str, ...] | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> "HeadModel":
    """A model of any Auto class whose outputs have logits. No weight is read now.

    Weights of the head that the files do not have, such as a classifier on a model that
    was trained on text alone, get the initial values that `transformers` gives them.

    Args:
        path_or_id: as for `load`.
        auto_class: the class of `transformers`, such as AutoModelForSeq2SeqLM or
            AutoModelForImageClassification.
        labels: names of the classes, for classifiers; None: those of config.json.
        dtype: as for `load`.
        seed: of initial values.

    Raises:
        FileNotFoundError, OSError: see `find_folder`.
        ValueError, NotImplementedError: see `read_config`; or the architecture has no
            such class, or labels are repeated or none.
    """
    folder = find_folder(path_or_id)
    config = read_config(folder)
    if labels is not None:
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(
                f"The labels of a classifier must be different names; found {labels!r}."
            )
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
    return HeadModel(str(path_or_id), folder, config, auto_class, dtype, seed)


class HeadModel(Model):
    """A model with another head than that of a causal language model.

    Attributes:
        name, folder, config, dtype: as of `Model`.
        auto_class: the class of `transformers` that the module is found by.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        config: transformers.PretrainedConfig,
        auto_class: str,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        super().__init__(name, folder, config, dtype)
        self.auto_class, self._seed = auto_class, seed
        self.peft_task = PEFT_TASKS.get(auto_class)
        text = config.get_text_config()
        ends = getattr(text, "eos_token_id", None)
        if getattr(text, "pad_token_id", None) is None and ends is not None:
            # A decoder finds the last token of a sample as the last without this one.
            text.pad_token_id = ends[0] if isinstance(ends, list) else ends
            config.pad_token_id = text.pad_token_id

    @cached_property
    def new_modules(self) -> tuple[str, ...]:
        """Modules of a new head: trained whole beside adapters, and saved whole."""
        names = self.specs if self._classifies else ()
        heads = [n for n in names if n.partition(".")[0] in CLASSIFIERS]
        return tuple(sorted({n.rpartition(".")[0] for n in heads}))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes of a classifier, in the order of its logits."""
        return tuple(self.config.id2label[i] for i in range(self.config.num_labels))

    @property
    def is_trained_so(self) -> bool:
        """Whether config.json lists the class of this model, head included."""
        return type(self.module).__name__ in (self.config.architectures or ())

    @property
    def padding(self) -> int:
        """The token that pads a sample, by which the module may find its end."""
        token = self.config.pad_token_id
        return super().padding if token is None else token

    @property
    def _classifies(self) -> bool:
        return "Classification" in self.auto_class

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        return signature(self.module.forward).parameters

    def logits(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = False
    ) -> jax.Array:
        """(batch, ..., classes or words), in the dtype that the model gives.

        Args:
            batch: arrays by the names of the module's arguments, such as `input_ids`
                and `attention_mask` (batch, tokens) or `pixel_values` (batch, channels,
                height, width). An encoder-decoder without `decoder_input_ids` gets its
                `labels`, one place later.
            key, train: as for `Model.logits`.
        """
        unknown = sorted(set(batch) - set(self.arguments) - {"labels"})
        if unknown:
            raise ValueError(
                f"The batch has {listed(unknown)}, which {type(self.module).__name__} "
                f"does not take. It takes {listed(list(self.arguments))}."
            )
        inputs = {name: batch[name] for name in batch if name != "labels"}
        is_encoder_decoder = getattr(self.config, "is_encoder_decoder", False)
        if is_encoder_decoder and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self._shifted(_labels(batch, self.name))
        options = {"use_cache": False} if "use_cache" in self.arguments else {}
        try:
            return self._run(params, inputs, options, key=key, train=train)
        except ValueError as error:
            if NO_PADDING not in str(error):
                raise
            # Only the module knows whether it looks for the last token of a sample.
            raise ValueError(
                f"{self.name} classifies the last token of a sample, the one before "
                "its padding, and its config.json names no token of padding and none "
                "that ends a text. Set pad_token_id there, or give one sample a batch."
            ) from error

    def loss(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        """The loss of all that has a label, and how many labels there are; float32.

        Args:
            batch: as for `logits`, and `labels`. Integers of the shape of the logits
                without their last dim: cross entropy in nats, -100 where there is no
                label. Floats of the shape of the logits, or without a last dim of 1:
                the squared error of a single output or where config.json says
                `regression`, else the sigmoid cross entropy of each class.

        Raises:
            ValueError: labels have another shape, or there are none.
        """
        labels = _labels(batch, self.name)
        logits = self.logits(params, batch, *key, train=train).astype(jnp.float32)
        is_number = jnp.issubdtype(labels.dtype, jnp.floating)
        if is_number and logits.shape[-1] == 1 and labels.ndim == logits.ndim - 1:
            labels = labels[..., None]
        wanted = logits.shape if is_number else logits.shape[:-1]
        if labels.shape != wanted or not is_number and logits.shape[-1] == 1:
            raise ValueError(
                f"labels are {labels.dtype}{list(labels.shape)}, and the logits of "
                f"{self.name} {list(logits.shape)}: integer labels must be "
                f"{list(logits.shape[:-1])}, of at least two classes, and floats "
                f"{list(logits.shape)}."
            )
        if not is_number:
            has_label = labels != IGNORED
            losses = cross_entropy(logits, jnp.where(has_label, labels, 0))
            losses = jnp.where(has_label, losses, 0.0)
            return Weighted(jnp.sum(losses), jnp.sum(has_label.astype(jnp.float32)))
        labels = labels.astype(jnp.float32)
        problem = getattr(self.config, "problem_type", None)
        if logits.shape[-1] == 1 or problem == "regression":
            losses = jnp.square(logits - labels)
        else:
            losses = jax.nn.softplus(logits) - labels * logits
        return Weighted(jnp.sum(losses), jnp.float32(losses.size))

    def running_loss(self, params: Params, batch: Batch) -> Weighted:
        """The sum of all outputs; see `Model.running_loss`."""
        logits = self.logits(params, batch).astype(jnp.float32)
        return Weighted(jnp.sum(logits), jnp.float32(1))

    def running_batch(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a batch of padded texts."""
        tokens = jax.ShapeDtypeStruct((rows, length), np.int32)
        return dict.fromkeys(("input_ids", "attention_mask"), tokens)

    def check(self, batch: Any) -> None:
        """Refuse tokens and labels that the model cannot know.

        Raises:
            ValueError: see `check_tokens`; or a label is no class of the model.
        """
        if not isinstance(batch, Mapping):
            return
        if "input_ids" in batch:
            words = () if self._classifies else ("labels",)
            check_tokens(
                batch,
                name=self.name,
                vocab_size=self.vocab_size,
                max_length=self.max_length,
                keys=("input_ids", *words),
            )
        labels = np.asarray(batch.get("labels", 0))
        if not self._classifies or not np.issubdtype(labels.dtype, np.integer):
            return
        is_known = (labels >= 0) & (labels < self.config.num_labels)
        wrong = labels[~(is_known | (labels == IGNORED))]
        if len(wrong):
            raise ValueError(
                f"The batch has the label {wrong[0]}, and {self.name} has "
                f"{self.config.num_labels} classes. Give `labels` with all names, or "
                "change the data."
            )

    def _stored(self, files: Dequantized) -> StoredWeights:
        """As `Model._stored`; weights of a new head have their initial values."""
        return _WithNewHead(files, self.module, self._seed)

    def log_probabilities(self, *_: Any, **__: Any) -> jax.Array:
        raise NotImplementedError(_not_causal(self, "log-probabilities of a text"))

    def token_log_probabilities(self, *_: Any, **__: Any) -> jax.Array:
        raise NotImplementedError(_not_causal(self, "log-probabilities of tokens"))

    def check_packing(self) -> None:
        raise NotImplementedError(_not_causal(self, "several samples in a row"))

    def _shifted(self, labels: jax.Array) -> jax.Array:
        """A decoder's input to predict labels: the labels before, and a first token.

        As `shift_tokens_right` of `transformers`.
        """
        start = self.config.decoder_start_token_id
        if start is None:
            start = self.config.bos_token_id
        first = jnp.full_like(labels[:, :1], start)
        before = jnp.concatenate([first, labels[:, :-1]], axis=1)
        return jnp.where(before == IGNORED, self.config.pad_token_id, before)


def _labels(batch: Batch, name: str) -> jax.Array:
    if "labels" not in batch:
        raise ValueError(
            f"A batch to train {name} has labels; this one has {', '.join(batch)}."
        )
    return batch["labels"]


def _not_causal(model: HeadModel, what: str) -> str:
    return (
        f"{model.name} was opened as {model.auto_class}, and {what} need a causal "
        "language model. Open it with zinf.hf.load."
    )


def _is_of_head(name: str, model: transformers.PreTrainedModel) -> bool:
    """Whether a text model's files may lack a parameter: of a head, or a pooler."""
    if POOLER in name.split("."):
        return True
    is_base = model.base_model is model
    return not is_base and not name.startswith(f"{model.base_model_prefix}.")


class _WithNewHead(StoredWeights):
    """Weights of files, and initial values of what only the head has."""

    def __init__(
        self, files: Dequantized, model: transformers.PreTrainedModel, seed: int
    ) -> None:
        super().__init__(files, model)
        absent = [n for n, _ in model.named_parameters() if n not in self.specs]
        new = [n for n in absent if _is_of_head(n, model)]
        self._values = {name: _initial(model, name, seed) for name in new}
        specs = {name: spec_of(torch.from_numpy(x)) for name, x in self._values.items()}
        self.specs = {**self.specs, **specs}
        self.new = tuple(self._values)

    def copies_of(self, name: str) -> int:
        return 1 if name in self._values else super().copies_of(name)

    def block(self, name: str) -> tuple[int, ...]:
        if name in self._values:
            return tuple(max(1, size) for size in self._values[name].shape)
        return super().block(name)

    def read(self, name: str, box: Box) -> np.ndarray:
        if name not in self._values:
            return super().read(name, box)
        return np.ascontiguousarray(self._values[name][tuple(slice(*e) for e in box)])


def _initial(model: transformers.PreTrainedModel, name: str, seed: int) -> np.ndarray:
    """The initial value of a parameter: what `transformers` gives it, in float32."""
    parent, _, leaf = name.rpartition(".")
    module = type(model).get_submodule(model, parent)
    made = copy(module)
    made._parameters = {
        name: parameter
        if parameter is None
        else torch.nn.Parameter(torch.zeros(parameter.shape))
        for name, parameter in module._parameters.items()
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # torch's generator on a CPU takes the lower 32 bits of a seed alone.
        torch.manual_seed(crc32(name.encode(), seed & 0xFFFFFFFF))
        reset = getattr(made, "reset_parameters", None)
        if reset is not None:
            reset()
        model._init_weights(made)
    return to_numpy(getattr(made, leaf))
