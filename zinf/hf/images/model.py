"""A model that reads images beside text, as a pure function of its parameters."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch
from torchax.interop import torch_view
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from zinf.hf.attention import apart_from_images
from zinf.hf.batch import by_sequence
from zinf.hf.call import TRACING
from zinf.hf.heads import HeadModel, load_head
from zinf.hf.images.kind import AbstractKind
from zinf.hf.images.kinds import AUTO_CLASS, KINDS, kind_of
from zinf.hf.images.placing import placing, replaced
from zinf.hf.model import (
    Batch,
    Model,
    Params,
    found_with_adapter,
    refuse_classifier,
)
from zinf.hf.module import output_name, read_config

PIXELS, FEATURES = "pixel_values", "features"
# Which keys of a cache are of images, bool (rows, slots).
SLOTS = "image_slots"
# The key of config.json, or of an adapter's own settings, that says that a model has
# multi-modal causal attention.
MULTIMODAL = "multimodal_causal_attention"
NOTE = (
    "This model has the multi-modal causal attention of DeepSpeed-VisualChat "
    f"(arXiv:2309.14327), as `{MULTIMODAL}` in config.json or zinf_adapter.json says: "
    "text sees images by a softmax of its own. `transformers` and PEFT do not read "
    "that key, and compute something else where a text has images. zinf computes it."
)
# Attributes of what `get_image_features` of transformers returns.
POOLED, DEEP = "pooler_output", "deepstack_features"


def load_with_images(
    path_or_id: str | Path,
    *,
    dtype: str = "float32",
    base: str | Path | None = None,
    trains_tower: bool = True,
    multimodal_attention: bool = False,
) -> "ImageModel":
    """A model that reads images beside text. No weight is read now.

    Args:
        path_or_id, dtype, base: as for `load`.
        trains_tower: whether the tower, which makes features of images, is trained
            with the rest.
        multimodal_attention: text has a softmax of its own for images, which see
            themselves alone (`zinf_kernels.attention.multimodal`). It is also so if
            config.json or an adapter says it, as exports of such a model do.

    Raises:
        NotImplementedError: zinf does not read images with this architecture, or it has
            no causal attention among images.
        FileNotFoundError, OSError, ValueError: see `load`.
    """
    name, folder, adapter = found_with_adapter(path_or_id, base)
    config = read_config(folder)
    refuse_classifier(name, config)
    kind = kind_of(config, name)
    if multimodal_attention or (adapter and adapter.own_settings.get(MULTIMODAL)):
        setattr(config, MULTIMODAL, True)
    model = ImageModel(name, folder, config, dtype, adapter)
    if model.is_multimodal and kind.sees_ahead:
        raise NotImplementedError(
            f"{name} is of the architecture {config.model_type!r}, in which tokens of "
            "an image see each other, so it has no multi-modal causal attention "
            "(model.multimodal_attention). Leave it out."
        )
    model.trains_tower = trains_tower
    return model


def load_head_with_images(
    path_or_id: str | Path,
    *,
    labels: tuple[str, ...] | None = None,
    dtype: str = "float32",
    seed: int = 0,
    trains_tower: bool = True,
) -> "ImageHead":
    """A classifier of images beside text, such as a reward model; no weight is read.

    Args:
        path_or_id, labels, dtype, seed: as for `load_head`.
        trains_tower: as for `load_with_images`.

    Raises:
        NotImplementedError: zinf does not read images with this architecture, or it
            has no such class in `transformers`.
        FileNotFoundError, OSError, ValueError: see `load_head`.
    """
    text = load_head(path_or_id, labels=labels)
    config, kinds = text.config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    kind_of(config, text.name)
    if config.model_type not in kinds:
        raise NotImplementedError(
            f"{text.name} is of the architecture {config.model_type!r}, of which "
            "transformers has no classifier, so it gives no scores of images. Use one "
            f"of {', '.join(KINDS.keys() & kinds.keys())}."
        )
    given = text.name, text.folder, config, text.auto_class, dtype, seed
    model = ImageHead(*given)
    model.trains_tower = trains_tower
    return model


class ImageModel(Model):
    """A model of text and images without its weights.

    Attributes:
        kind: how it reads images.
        trains_tower: whether the weights of its tower are trained.
    """

    auto_class = AUTO_CLASS
    trains_tower = True

    @property
    def kind(self) -> AbstractKind:
        return kind_of(self.config, self.name)

    @property
    def never_written(self) -> tuple[int, ...]:
        # An image that is written would have no features.
        return (self.image_token,)

    @property
    def is_multimodal(self) -> bool:
        """Whether text has a softmax of its own for images."""
        return bool(getattr(self.config, MULTIMODAL, False))

    @property
    def note(self) -> str:
        return NOTE if self.is_multimodal else ""

    @property
    def adapter_settings(self) -> dict[str, Any]:
        return {MULTIMODAL: True} if self.is_multimodal else {}

    @property
    def image_leaves(self) -> tuple[str, ...]:
        return self.kind.leaves

    @property
    def image_token(self) -> int:
        """The token in whose places features of images are."""
        return self.config.image_token_id

    @cached_property
    def untrained(self) -> tuple[str, ...]:
        """As `Model.untrained`, with the tower if it is not trained."""
        frozen = super().untrained
        if self.trains_tower:
            return frozen
        tower = [name for name in self.specs if self.is_of_tower(name)]
        return tuple(dict.fromkeys([*frozen, *tower]))

    @property
    def without_adapters(self) -> tuple[str, ...]:
        return () if self.trains_tower else self.untrained

    def is_of_tower(self, name: str) -> bool:
        """Whether a parameter is one of the tower."""
        return name.startswith(f"model.{self.kind.tower}.")

    def leaves_of(self, batch: Batch) -> tuple[Sequence[str], Sequence[str]]:
        """As `Model.leaves_of`; with images there is no packing and no dropping."""
        if PIXELS not in batch:
            return super().leaves_of(batch)
        return ("input_ids", *self.kind.leaves), ("labels", "attention_mask")

    def _run(
        self,
        params: Params,
        inputs: Batch,
        options: Mapping[str, Any],
        *,
        key: Sequence[jax.Array],
        train: bool,
        **rest: Any,
    ) -> jax.Array:
        text = dict(inputs)
        named: dict[str, Any] = {"key": key, "train": train, **rest}
        is_image = text["input_ids"] == self.image_token
        has_images = not {PIXELS, FEATURES, SLOTS}.isdisjoint(text)
        images = is_image, text.pop(SLOTS, is_image)
        apart = images if has_images and self.is_multimodal else None
        with apart_from_images(apart):
            if {PIXELS, FEATURES}.isdisjoint(text):
                return super()._run(params, text, options, **named)
            return self._run_with_images(params, text, options, **named)

    def _run_with_images(
        self, params: Params, inputs: Batch, options: Mapping[str, Any], **named: Any
    ) -> jax.Array:
        """`_run` with pixels, or with what the tower made of them."""
        kind, inner = self.kind, self.module_for(params).model
        text = dict(inputs)
        is_image = text["input_ids"] == self.image_token
        if FEATURES in text:
            features = text.pop(FEATURES)
            # Something must stand for images, or the module looks for no features.
            images, within = {PIXELS: is_image}, _as_computed(inner, features)
        else:
            leaves = {name: text.pop(name) for name in kind.leaves}
            images = kind.inputs(leaves, next(iter(params.values())).dtype)
            within = kind.within(inner, leaves)
        given = text | images | kind.types(is_image)
        # A call changes the module while it lasts.
        with TRACING, placing(inner), within:
            return super()._run(params, given, options, **named)

    def features(self, params: Params, leaves: Batch) -> Any:
        """What the tower makes of the images of a batch, for `inputs["features"]`.

        Args:
            leaves: those of `kind.leaves`, but for `position_ids`.
        """
        module = self.module_for(params)

        def forward(pixel_values: torch.Tensor) -> SimpleNamespace:
            found = module.model.get_image_features(pixel_values)
            pooled = found.pooler_output
            if not isinstance(pooled, torch.Tensor):
                # LLaVA has an array for each tile.
                pooled = [torch.cat(tuple(pooled))]
            values = {POOLED: pooled}
            if hasattr(found, DEEP):
                values[DEEP] = getattr(found, DEEP)
            return SimpleNamespace(**{output_name(self.auto_class): values})

        dtype = next(iter(params.values())).dtype
        given = {PIXELS: self.kind.inputs(leaves, dtype)[PIXELS]}
        within = self.kind.within(module.model, leaves)
        with TRACING, within, replaced(module, forward=forward):
            return super()._run(params, given, {}, key=(), train=False)

    def running_batch(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """As `Model.running_batch`; with an adapter, which may be of the tower too."""
        text = super().running_batch(rows, length)
        if self.adapter is None:
            return text
        return text | self.kind.specs(rows, room_of(self, None), length)

    def check_packing(self) -> None:
        raise NotImplementedError(
            f"Several samples in a row are not supported with images ({self.name}). "
            "Set data.packing to false."
        )

    def check_dropping(self) -> None:
        raise NotImplementedError(
            f"Layers of {self.name} cannot drop tokens beside images. Turn "
            "data_efficiency.data_routing.random_ltd off."
        )

    def check(self, batch: Any) -> None:
        """As `Model.check`; also compare the places of images with the images.

        Raises:
            ValueError: a row has more or fewer images than places for them.
        """
        super().check(batch)
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            return
        ids = np.asarray(batch["input_ids"])
        num_tokens = np.count_nonzero(ids == self.image_token, axis=-1).reshape(-1)
        given = np.zeros_like(num_tokens)
        if PIXELS in batch:
            given = self.kind.num_given(by_sequence(batch, self.kind.leaves))
        tokens, pieces = self.kind.tokens_of
        places = num_tokens * pieces
        wrong = np.flatnonzero(places != given * tokens)
        if len(wrong):
            row = wrong[0]
            raise ValueError(
                f"Sample {row} of the batch has {num_tokens[row]:,} image tokens "
                f"(token {self.image_token}), which are places for "
                f"{places[row] / tokens:,g} {self.kind.pieces}, and {given[row]:,} "
                f"{self.kind.pieces} are given. {self.name} has {tokens} tokens for "
                f"{pieces} {self.kind.pieces}. Use the processor of this model."
            )


class ImageHead(ImageModel, HeadModel):
    """A classifier of text and images without its weights."""


def room_of(model: ImageModel, most: int | None) -> int:
    """The pieces that rows have room for, of which a sample has `most`.

    At least one, so that batches without images have the leaves of others.
    """
    unit = model.kind.unit
    return max(unit, -(-(most or 0) // unit) * unit)


def check_pieces(model: ImageModel, num_pieces: int, room: int, where: str) -> None:
    """Raise ValueError if a sample has more pieces than a row has room for.

    Args:
        where: the sample, for the message.
    """
    if num_pieces > room:
        raise ValueError(
            f"{where} has {num_pieces:,} {model.kind.pieces} of images, and "
            f"data.images is {room:,}. Raise it, leave it out so that the files "
            "decide, or make images smaller (the settings of the processor)."
        )


def _as_computed(inner: torch.nn.Module, features: Any) -> AbstractContextManager[Any]:
    """A context in which the tower does not run: its features are there."""

    def given(*_: Any, **__: Any) -> BaseModelOutputWithPooling:
        found = BaseModelOutputWithPooling()
        for name, value in features.items():
            setattr(found, name, torch_view(value))
        return found

    return replaced(inner, get_image_features=given)
