"""A `transformers` model as a pure function of its parameters.

`torchax` runs a torch module on jax arrays, so tracing it gives a jaxpr as any other
loss does. Parameters have the names that the module gives them.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy, deepcopy
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from torchax.interop import jax_view

from zinf.adapt.blocks import Encoding
from zinf.core.interchange.names import Terms, listed, match
from zinf.core.interchange.safetensors_files import SUFFIX, SafetensorsFiles
from zinf.core.problem.weighted import Weighted
from zinf.core.program import ArraySpec
from zinf.core.text.json_text import unreadable_object
from zinf.hf import attention
from zinf.hf.adapter import SavedAdapter, base_of, naming_of, read_adapter
from zinf.hf.attention import within_segments
from zinf.hf.batch import (
    Batch,
    check_leaves,
    check_some_label,
    check_tokens,
    entropies,
    packed,
    without,
)
from zinf.hf.call import TRACING, outputs_of
from zinf.hf.dropping import dropping, layers_of
from zinf.hf.expected import expected_files
from zinf.hf.folder import find_folder, weights_digest, weights_path
from zinf.hf.masks import counted_positions
from zinf.hf.module import (
    CONFIG,
    build,
    output_name,
    own_part,
    read_config,
    read_quantization,
)
from zinf.hf.quantized import plain
from zinf.hf.quantized.packed import Dequantized
from zinf.hf.rotary import each_as_last, growth_of
from zinf.hf.weights import (
    AbstractWeights,
    StoredWeights,
    check_dtypes,
    spec_of,
    to_numpy,
)

logger = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound="Model")
Params = dict[str, jax.Array]

# Leaves that a batch may have beside its tokens.
OPTIONAL = ("labels", "attention_mask", "position_ids", "segment_ids", "kept")
# Leaves of a batch that the torch module does not get.
OWN_KEYS = ("labels", "segment_ids", "kept")
# Layers in which a token sees others through a mask alone.
MASKED_LAYERS = {"full_attention", "sliding_attention"}
# The argument for keys and values so far; older modules have the second name.
CACHE_NAMES = ("cache", "past_key_values")
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
TRAINED_DTYPES = ("float32", "bfloat16", "float16")
# Parts of the names of settings that make a training pass random.
RANDOM = ("drop", "jitter", "noise")


def load(
    path_or_id: str | Path,
    *,
    dtype: str = "float32",
    base: str | Path | None = None,
    random_ltd_layers: Sequence[int] = (),
) -> "Model":
    """A causal language model. Only its config.json is read now, and no weight.

    For models of other kinds, such as classifiers, see `load_head`.

    Args:
        path_or_id: a folder, a config.json, or the name of a model on the hub. It may
            have an adapter alone, as zinf and PEFT write it: then the model is its
            base, and `open_model` adds the adapter.
        dtype: of the trained parameters. With `bf16` in the config of zinf, parameters
            in float32 have copies in bfloat16. "bfloat16" trains without masters.
        base: of an adapter, in place of the one that its adapter_config.json names.
        random_ltd_layers: those that run on the tokens that a batch has under "kept",
            from 0, ascending.

    Raises:
        FileNotFoundError, OSError: see `find_folder`; or the base is absent.
        ValueError, NotImplementedError: see `read_config` and `read_adapter`; or the
            files are of a classifier, or the architecture has no causal language model,
            or not so many layers.
    """
    name, folder, adapter = found_with_adapter(path_or_id, base)
    config, layers = read_config(folder), tuple(random_ltd_layers)
    refuse_classifier(name, config)
    part = own_part(config, Model.auto_class)
    if type(part) in transformers.AutoModelForCausalLM._model_mapping:
        config = part
    count = config.get_text_config().num_hidden_layers if layers else 0
    outside = [layer for layer in layers if not 0 <= layer < count]
    if outside:
        raise ValueError(
            f"random_ltd_layers has {outside[0]}, but the layers of {name} are 0 to "
            f"{count - 1}."
        )
    return Model(name, folder, config, dtype, adapter, layers)


def found_with_adapter(
    path_or_id: str | Path, base: str | Path | None
) -> tuple[str, Path, SavedAdapter | None]:
    """The name and the folder of a whole model, and the adapter for it, if any.

    Args:
        path_or_id, base: as for `load`.

    Raises:
        FileNotFoundError, OSError, ValueError, NotImplementedError: see `load`.
    """
    folder, name = find_folder(path_or_id), str(path_or_id)
    adapter = read_adapter(folder)
    if adapter is not None:
        # The hub gives weights only if they are asked for.
        adapter = read_adapter(find_folder(path_or_id, weights=True))
    if adapter is not None:
        name, folder = base_of(adapter, base)
    elif base is not None:
        raise ValueError(
            f"{name} is a whole model, so base = {base} has no use. Leave it out."
        )
    return name, folder, adapter


def refuse_classifier(name: str, config: transformers.PretrainedConfig) -> None:
    """Refuse files with a head of classes, without which a model says nothing.

    Raises:
        ValueError: see above.
    """
    for kind in config.architectures or ():
        if kind.endswith("ForSequenceClassification"):
            raise ValueError(
                f"{name} is a classifier ({kind}), and a language model is wanted. "
                "zinf finetune --objective classification (or reward) trains it on, "
                "and zinf evaluate CONFIG evaluates a run of it; in Python use "
                "hf.load_head."
            )


def load_as_stored(
    path_or_id: str | Path, *, base: str | Path | None = None
) -> "Model":
    """`load` in the precision of the files, to run and not to train.

    Float16 becomes bfloat16, which has the range that float16 lacks.
    """
    return in_stored_precision(load(path_or_id, base=base))


def in_stored_precision(model: Kind) -> Kind:
    """The model itself, with weights in float32 or bfloat16 as its files are."""
    if model.stored_dtype != "float32":
        model.dtype = "bfloat16"
    return model


class Model:
    """A causal language model without its weights.

    Attributes:
        name: what `load` was given.
        folder: has config.json, the tokenizer, and maybe the weights.
        config: of `transformers`.
        dtype: of the trained parameters.
        stored_dtype: of the weights in the files, by config.json. None if it is none
            that weights are trained in.
        auto_class: the class of `transformers` that the module is found by.
        peft_task: what PEFT calls models of that class.
        adapter: what `open_model` adds to the weights; None if nothing.
        random_ltd_layers: which layers may drop tokens.
    """

    auto_class = "AutoModelForCausalLM"
    peft_task: str | None = "CAUSAL_LM"

    def __init__(
        self,
        name: str,
        folder: Path,
        config: transformers.PretrainedConfig,
        dtype: str = "float32",
        adapter: SavedAdapter | None = None,
        random_ltd_layers: tuple[int, ...] = (),
    ) -> None:
        self.name, self.folder, self.config, self.dtype = name, folder, config, dtype
        # `transformers` changes config.dtype as it builds the module.
        stored = str(config.dtype or "float32").removeprefix("torch.")
        self.stored_dtype = stored if stored in TRAINED_DTYPES else None
        self.adapter, self.random_ltd_layers = adapter, random_ltd_layers
        self._modules: dict[str, transformers.PreTrainedModel] = {}
        self._stored_buffers: dict[str, np.ndarray] = {}
        # The names of weights that are tied in the files and not here.
        self._parted: Mapping[str, Sequence[str]] = {}
        # By whether the files are here.
        self._encodings: dict[bool, Mapping[str, Encoding]] = {}

    def as_adapted(self) -> "Model":
        """The model that its adapter is for: itself, or one that ties no weights.

        PEFT adapts each place of a tied weight by itself. If an adapter changes one
        place alone, or each in another way, the weight is parted, as PEFT does.

        Raises:
            NotImplementedError: the architecture cannot do without tied weights.
        """
        naming = naming_of(self.module)
        parting = "" if self.adapter is None else self.adapter.parting(naming)
        if not parting:
            return self
        made = copy(self)
        made.__dict__.pop("specs", None)
        made.config, made._modules = deepcopy(self.config), {}
        made._encodings = {}
        made._stored_buffers = dict(self._stored_buffers)
        for config in (made.config, made.config.get_text_config()):
            config.tie_word_embeddings = False
        made._parted = naming.tied
        assert self.adapter is not None
        if made.adapter is not None and made.adapter.parting(naming_of(made.module)):
            raise NotImplementedError(
                f"The adapter in {self.adapter.folder} parts a tied weight: {parting}, "
                f"and {type(self.module).__name__} has it tied always. Merge the "
                "adapter in PEFT, and use the merged model."
            )
        return made

    @property
    def parts(self) -> Mapping[str, "Model"]:
        """The models that it is made of, by what their parameters' names begin with."""
        return {"": self}

    @property
    def digest(self) -> str:
        """The `weights_digest` of the model, and of its adapter if it has one."""
        own = weights_digest(self.folder)
        if self.adapter is None:
            return own
        return f"{own}, adapter {weights_digest(self.adapter.folder)}"

    @property
    def module(self) -> transformers.PreTrainedModel:
        """The torch module; its parameters are on the meta device."""
        return self.module_in(self.dtype)

    def module_in(self, dtype: str) -> transformers.PreTrainedModel:
        """The torch module in a dtype, on which the dtypes of its buffers depend."""
        if dtype not in self._modules:
            made = build(self.config, getattr(torch, dtype), self.auto_class)
            self._modules[dtype] = made
        return self._modules[dtype]

    @cached_property
    def specs(self) -> dict[str, ArraySpec]:
        """Shape and dtype of each parameter by its name; a tied one once."""
        return {name: spec_of(p) for name, p in self.module.named_parameters()}

    @cached_property
    def untrained(self) -> tuple[str, ...]:
        """Names of the parameters that torch does not train (`requires_grad` is False).

        Such are tables of sinusoidal positions, the initial state of HRM, and biases
        by which routers balance their experts.
        """
        named = self.module.named_parameters()
        return tuple(name for name, p in named if not p.requires_grad)

    @property
    def num_parameters(self) -> int:
        return sum(spec.nbytes // spec.itemsize for spec in self.specs.values())

    @property
    def vocab_size(self) -> int:
        return self.module.get_input_embeddings().weight.shape[0]

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the model was made for; None if it says none.

        Rotary embeddings of the kind `dynamic` stretch the model by their factor.
        """
        text = self.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None)
        return None if longest is None else int(longest * growth_of(text))

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """The tokenizer beside the adapter, if there is one, or beside the model.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        folder = self.folder
        if self.adapter is not None and any(self.adapter.folder.glob("tokenizer*")):
            folder = self.adapter.folder
        try:
            return transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False
            )
        except Exception as error:  # Of any kind, as the files are anybody's.
            found = unreadable_object(folder, TOKENIZER_FILES)
            found = found or f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(
                f"{folder} has no tokenizer that transformers can read: {found} Put "
                "tokenizer.json and tokenizer_config.json of the model there."
            ) from error

    @property
    def note(self) -> str:
        """What a model card says of how it differs from a model of `transformers`."""
        return ""

    @property
    def adapter_settings(self) -> dict[str, Any]:
        """What the folder of an adapter says of how this base computes."""
        return {}

    @property
    def never_written(self) -> tuple[int, ...]:
        """Tokens that completions do not have, and with which none are scored."""
        return ()

    @property
    def scored_leaves(self) -> tuple[str, ...]:
        """Names of the leaves of a batch that it reads, with the labels it scores."""
        return ("input_ids", "labels", *self.image_leaves)

    @property
    def image_leaves(self) -> tuple[str, ...]:
        """Leaves of a batch that images add to those of text."""
        return ()

    @property
    def without_adapters(self) -> tuple[str, ...]:
        """Parameters that get no adapters, whatever modules they are in."""
        return ()

    @cached_property
    def new_modules(self) -> tuple[str, ...]:
        """Modules without trained weights: they are trained whole beside adapters."""
        return ()

    @cached_property
    def is_random(self) -> bool:
        """Whether a training pass of the model draws random numbers (dropout)."""
        settings = self.config.get_text_config().to_dict()
        asked = [
            key
            for key, value in settings.items()
            if isinstance(value, float) and value and any(w in key for w in RANDOM)
        ]
        drops = (m for m in self.module.modules() if isinstance(m, torch.nn.Dropout))
        return bool(asked) or any(module.p for module in drops)

    def zeros(self) -> Params:
        """Parameters of 0, by name: their shapes and dtypes under `jax.eval_shape`."""
        return {n: jnp.zeros(s.shape, s.dtype) for n, s in self.specs.items()}

    def open_weights(self) -> tuple[AbstractContextManager, AbstractWeights]:
        """The open files, which the caller closes, and the weights in them.

        Raises:
            FileNotFoundError, NotImplementedError: see `weights_path` and
                `check_dtypes`.
            ValueError: a file is damaged, or lacks what the model needs.
        """
        folder = find_folder(self.name, weights=True)
        files = SafetensorsFiles(weights_path(folder))
        try:
            tensors = plain(files, read_quantization(folder))
            check_dtypes(tensors.specs)
            return files, self._stored(tensors)
        except BaseException:
            files.close()
            raise

    def find_weights(self) -> None:
        """Get the files of a quantized model of the hub: what is kept depends on them.

        Raises:
            FileNotFoundError, OSError: see `find_folder`.
        """
        for model in self.parts.values():
            if read_quantization(model.folder) is not None:
                find_folder(model.name, weights=True)

    @property
    def encodings(self) -> dict[str, Encoding]:
        """Frozen weights that stay in few bits as the files have them, by name.

        Of a model whose files are not here they are what its config.json says, and a
        warning says what that leaves open.

        Raises:
            FileNotFoundError, NotImplementedError, ValueError: see `open_weights`.
        """
        parts = self.parts.items()
        return {p + n: x for p, model in parts for n, x in model._kept().items()}

    def _kept(self) -> Mapping[str, Encoding]:
        section = read_quantization(self.folder)
        if section is None:
            return {}
        is_here = any(self.folder.glob(f"*{SUFFIX}"))
        if is_here not in self._encodings:
            found = self._encodings_in_files() if is_here else self._expected(section)
            self._encodings[is_here] = found
        return self._encodings[is_here]

    def _encodings_in_files(self) -> Mapping[str, Encoding]:
        files, weights = self.open_weights()
        with files:
            return weights.codes.encodings

    def _expected(self, section: Mapping[str, Any]) -> Mapping[str, Encoding]:
        try:
            files, assumed = expected_files(self.specs, self.module, section)
        except (re.error, TypeError, AttributeError) as error:
            raise ValueError(
                f"quantization_config of {self.folder / CONFIG} is not of the form "
                f"that its method has ({error}). Get it again."
            ) from error
        for sentence in assumed:
            logger.warning(
                f"{self.name} has no weights beside {CONFIG}, so they are planned by "
                f"its quantization_config: {sentence}."
            )
        return self._stored(plain(files, section)).codes.encodings

    @property
    def terms(self) -> Terms:
        """How the files of the model may differ from it: by buffers and by rounding."""
        buffers = [name for name, _ in self.module.named_buffers()]
        remedy = (
            f"Here is what {CONFIG} of {self.name} says, there what its files have. "
            "Get all of them anew from one place."
        )
        return Terms(ignore=buffers, may_round=True, remedy=remedy)

    def check_files(self) -> None:
        """Compare the names and shapes in the files with the model; read no weight.

        Files of a model of the hub are not: they are not downloaded before it is known
        that the model can be trained.

        Raises:
            FileNotFoundError, NotImplementedError, ValueError: see `open_weights`; or
                the files are of another model.
        """
        if not Path(self.name).expanduser().exists():
            return
        files, weights = self.open_weights()
        with files:
            match(self.specs, weights.specs, {n: n for n in self.specs}, self.terms)

    def _stored(self, files: Dequantized) -> StoredWeights:
        """The weights of the model in its files, under the names of its parameters."""
        return StoredWeights(files, self.module, self._parted.values())

    def leaves_of(self, batch: Batch) -> tuple[Sequence[str], Sequence[str]]:
        """The leaves that a batch must have, and others that it may have."""
        del batch
        return ("input_ids",), OPTIONAL

    def module_for(self, params: Params) -> transformers.PreTrainedModel:
        """The torch module in the dtype of parameters."""
        return self.module_in(str(next(iter(params.values())).dtype))

    def logits(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = False
    ) -> jax.Array:
        """(batch, tokens, words), in the dtype that the model gives.

        Args:
            params: by name, all in one dtype; see `specs`.
            batch: `input_ids` (batch, tokens) and, where given, `attention_mask`,
                `position_ids` and `segment_ids` of that shape. No token sees one with
                another segment id; positions then begin anew with each segment.
                With `kept`, integers (batch, layers, kept), the positions of the tokens
                on which each of `random_ltd_layers` runs; see `zinf.random_ltd`.
            key: for dropout; without it the model runs as in evaluation.
            train: whether the model runs as in training.
        """
        check_leaves(batch, self.name, *self.leaves_of(batch))
        is_padded = "attention_mask" in batch
        if "segment_ids" in batch:
            self.check_packing()
            batch = packed(batch)
        if "kept" in batch:
            self.check_dropping()
        inputs = {name: batch[name] for name in batch if name not in OWN_KEYS}
        with within_segments(batch.get("segment_ids"), is_padded=is_padded):
            return self.call(
                params, inputs, key=key, train=train, kept=batch.get("kept")
            )

    def call(
        self,
        params: Params,
        inputs: Batch,
        *,
        key: Sequence[jax.Array] = (),
        train: bool = False,
        cache: transformers.Cache | None = None,
        every: bool = False,
        kept: jax.Array | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> jax.Array:
        """The logits of a call of the module.

        Args:
            inputs: arrays by the names of the module's arguments.
            cache: keys and values so far, which the module changes. With one, the
                logits are those of the last token alone, where the module can, unless
                `every`, which is for tokens that may be guessed wrong.
            kept: positions of the tokens on which `random_ltd_layers` run.
            before: called in the mode in which torch tensors are jax arrays.
        """
        options: dict[str, Any] = {"use_cache": False}
        if cache is not None:
            accepted = signature(self.module.forward).parameters
            name = next(n for n in CACHE_NAMES if n in accepted)
            options = {"use_cache": True, name: cache}
            if not every and "logits_to_keep" in accepted:
                options["logits_to_keep"] = 1
        rest = {"key": key, "train": train, "kept": kept, "before": before}
        with each_as_last(every):
            return self._run(params, inputs, options, **rest)

    def _run(
        self,
        params: Params,
        inputs: Batch,
        options: Mapping[str, Any],
        *,
        key: Sequence[jax.Array],
        train: bool,
        kept: jax.Array | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> jax.Array:
        """The logits of a call of the module with arrays, and with other options."""
        module = self.module_for(params)
        drops = dropping(module, self.random_ltd_layers, kept)
        # A call changes the module while it lasts.
        with TRACING, drops, counted_positions("position_ids" not in inputs):
            result = outputs_of(
                module,
                params,
                inputs,
                options,
                key=key[0] if key else None,
                train=train,
                buffers=self._stored_buffers,
                before=before,
            )
        return jax_view(getattr(result, output_name(self.auto_class)))

    def loss(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        """The cross entropy of the next token, in nats, and its number of tokens.

        Args:
            batch: as for `logits`; also `labels` (batch, tokens), which are those of
                the same position, -100 where a token is not trained on. Without labels,
                all tokens are trained on but those that `attention_mask` leaves out.

        Returns:
            the sum over tokens with a label, and how many tokens have one; both
            float32.
        """
        losses, is_trained = self._token_losses(params, batch, *key, train=train)
        return Weighted(jnp.sum(losses), jnp.sum(is_trained.astype(jnp.float32)))

    def running_loss(self, params: Params, batch: Batch) -> Weighted:
        """A loss that needs no labels: runs that train nothing are planned with it.

        Args:
            batch: see `running_batch`.
        """
        return self.loss(params, batch, train=False)

    def running_batch(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the batch of texts for which room is left."""
        return {"input_ids": jax.ShapeDtypeStruct((rows, length), np.int32)}

    def log_probabilities(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = False
    ) -> jax.Array:
        """The log-probability of all tokens with a label together, float32 (batch,).

        Args:
            batch: as for `loss`.
        """
        losses, _ = self._token_losses(params, batch, *key, train=train)
        return -jnp.sum(losses, axis=1)

    def _token_losses(
        self,
        params: Params,
        batch: Batch,
        *key: jax.Array,
        train: bool,
        temperature: float = 1.0,
        never: Sequence[int] = (),
    ) -> tuple[jax.Array, jax.Array]:
        """The cross entropy of the token after each, and whether it has a label.

        Both (batch, tokens); where there is no label, the loss is 0.

        Args:
            never: tokens that the model does not write.
        """
        logits = self.logits(params, batch, *key, train=train).astype(jnp.float32)
        logits = without(never, logits)
        if temperature != 1:
            logits = logits / temperature
        return entropies(logits, batch)

    @property
    def padding(self) -> int:
        """The token of rows where they have no sample."""
        ids = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0
        return next(token for token in ids if token is not None)

    def check_whole(self) -> None:
        """Refuse to train a model that was loaded with an adapter.

        Raises:
            ValueError: see above.
        """
        if self.adapter is not None:
            raise ValueError(
                f"{self.adapter.folder} has an adapter, which is not trained as a "
                f"model is. Name its base {self.name}, and have it begin from the "
                "adapter: adapter.begin_from, or zinf finetune --lora RANK --adapter."
            )

    def check_packing(self) -> None:
        """Refuse a model in which samples of one row would see each other.

        Raises:
            NotImplementedError: it has layers that a mask does not part, such as
                recurrent ones, or takes no positions.
        """
        reason = self._not_masked()
        if reason:
            raise NotImplementedError(
                f"Several samples in a row would see each other in {self.name}: "
                f"{reason}. Set data.packing to false."
            )

    def check_dropping(self) -> None:
        """Refuse a model in which tokens beside dropped ones would see others.

        Raises:
            NotImplementedError: what a token sees depends on its place among the tokens
                of a layer, and not on a mask and positions from outside.
        """
        reason = self._not_masked()
        if reason:
            raise NotImplementedError(
                f"Layers of {self.name} cannot drop tokens: {reason}. Turn "
                "data_efficiency.data_routing.random_ltd off."
            )
        layers_of(self.module)

    def _not_masked(self) -> str:
        """Why no mask decides what a token sees; empty if one does."""
        module, text = self.module, self.config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ()) - MASKED_LAYERS
        if any(isinstance(m, torch.nn.Conv1d) for m in module.modules()):
            kinds.add("convolution")
        if getattr(module, "_is_stateful", False):
            return "it keeps a state from token to token"
        if self.config._attn_implementation not in (attention.NAME, attention.ADDING):
            return "its attention takes no mask from outside"
        if "position_ids" not in signature(module.forward).parameters:
            return "it takes no position_ids"
        return f"it has layers of {', '.join(sorted(kinds))}" if kinds else ""

    def token_log_probabilities(
        self,
        params: Params,
        batch: Batch,
        *key: jax.Array,
        train: bool = False,
        temperature: float = 1.0,
    ) -> jax.Array:
        """Log-probabilities of tokens given those before, float32 (batch, tokens - 1).

        They are those of completions, which have no token of `never_written`.

        Args:
            batch: as for `loss`; tokens without a label have 0.
            temperature: logits are divided by it.
        """
        rest: dict[str, Any] = {"train": train, "temperature": temperature}
        rest["never"] = self.never_written
        return -self._token_losses(params, batch, *key, **rest)[0][:, :-1]

    def check(self, batch: Any) -> None:
        """Refuse tokens that the model cannot know, and a batch that trains on none.

        Raises:
            ValueError: see `check_tokens` and `check_some_label`.
        """
        check_tokens(
            batch,
            name=self.name,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
        )
        if isinstance(batch, Mapping):
            check_some_label(batch.get("labels"))

    def persistent_buffers(self) -> dict[str, np.ndarray]:
        """The buffers that files of the model have, by name."""
        kept = self.module.state_dict().keys()
        return {
            name: self._stored_buffers.get(name, to_numpy(buffer))
            for name, buffer in self.module.named_buffers()
            if name in kept
        }

    def read_buffers(self) -> None:
        """Read the buffers that the files have; they are constants of the loss.

        Raises:
            ValueError: a file has none, or one of another shape.
        """
        buffers = dict(self.module.named_buffers())
        stored = sorted(self.module.state_dict().keys() & buffers.keys())
        if not stored:
            return
        files, weights = self.open_weights()
        with files:
            missing = [name for name in stored if name not in weights.specs]
            if missing:
                raise ValueError(
                    f"The files in {self.folder} have no tensor for the buffers "
                    f"{listed(missing)}. Get the files again."
                )
            for name in stored:
                value, buffer = weights.whole(name), to_numpy(buffers[name])
                if value.shape != buffer.shape:
                    raise ValueError(
                        f"The buffer {name!r} is {list(value.shape)} in the files of "
                        f"{self.folder} and {list(buffer.shape)} in the model. Check "
                        "that config.json belongs to the files."
                    )
                self._stored_buffers[name] = value.astype(buffer.dtype)

    def __repr__(self) -> str:
        kind = self.config.model_type
        return f"<Model {self.name}: {kind}, {self.num_parameters:,} parameters>"
