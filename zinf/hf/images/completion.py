"""Prompts with images, and the model that goes on after them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.sharding import Dim
from zinf.hf.completion import prompt_tokens
from zinf.hf.decoder import AbstractBeside
from zinf.hf.engine import ModelEngine, decoder_for
from zinf.hf.images.model import FEATURES, SLOTS, ImageModel
from zinf.hf.images.patches import PLACES
from zinf.hf.images.reader import ImageReader
from zinf.inference import Decoder


@dataclass(frozen=True)
class ImagePrompt:
    """The tokens of a prompt, and its images.

    Attributes:
        tokens: int32 (tokens,).
        leaves: what the model takes of the images, a row of a batch.
    """

    tokens: np.ndarray
    leaves: Mapping[str, np.ndarray]


def image_prompt(model: ImageModel, text: str, images: Sequence[Path]) -> ImagePrompt:
    """What a user says after images, laid out by the chat template.

    Raises:
        ValueError: an image cannot be read, or the template has no places for images.
    """
    reader = ImageReader(model)
    if not reader.chat_template:
        raise ValueError(
            f"{model.name} has no chat template, so it does not say where images are "
            "in a text. Put chat_template.jinja of the model beside its tokenizer."
        )
    where = "--image"
    parts = [*({"type": "image", "path": str(x)} for x in images)]
    parts.append({"type": "text", "text": text})
    line = {"messages": [{"role": "user", "content": parts}]}
    line, _, seen = reader.read(line, where, Path())
    given = {"chat": True, "tokenizer": reader.layout(seen)}
    tokens = prompt_tokens(model, line, where, **given)
    return ImagePrompt(tokens, reader.row(seen, tokens, where))


def decoder_after(engine: ModelEngine, prompt: ImagePrompt) -> Decoder:
    """The model as it goes on after one prompt with images.

    The tower runs now, once.

    Raises:
        InfeasibleError: the tower does not fit beside the arrays at rest.
    """
    shown = ShownImages(engine, len(prompt.tokens))
    shown.show(prompt)
    return shown.decoder


class ShownImages(AbstractBeside):
    """The images of the prompt that a decoder reads next, which all its rows share.

    Programs ask for them as they run, so other images need no other programs.

    Args:
        engine: runs the tower.
        length: tokens of the longest prompt, or of a row.
    """

    def __init__(self, engine: ModelEngine, length: int) -> None:
        model = engine.model
        assert isinstance(model, ImageModel)
        self._engine, self._model, self._length = engine, model, length
        self._features = engine.applied(model.features)
        self._arrays: dict[str, Any] = {}
        self._decoder: Decoder | None = None

    @property
    def decoder(self) -> Decoder:
        """The same one for all prompts; the first is to be shown before."""
        if self._decoder is None:
            engine = self._engine
            given = engine.model, engine.adapted, engine.planner
            self._decoder = decoder_for(*given, self)
        return self._decoder

    def show(self, prompt: ImagePrompt) -> None:
        """Run the tower on the images of a prompt.

        Later ones have as many pieces as the first, with filling. Devices that divide
        rows each make the features of all images. If there are several processes, all
        must call this with the same prompt.
        """
        planner = self._engine.planner
        count = planner.rule.size(Dim.BATCH)
        own = count // planner.num_shares
        leaves = {
            n: np.repeat(x[None], own, axis=0)
            for n, x in prompt.leaves.items()
            if n != PLACES
        }
        features = self._engine.apply(self._features, leaves)
        arrays = {FEATURES: jax.tree.map(lambda x: x[: len(x) // count], features)}
        if PLACES in prompt.leaves:
            arrays[PLACES] = with_text(prompt.leaves[PLACES], self._length)
        if self._model.is_multimodal:
            is_image = prompt.tokens == self._model.image_token
            arrays[SLOTS] = np.pad(is_image, (0, self._length - len(is_image)))
        self._arrays = jax.tree.map(np.asarray, arrays)

    def state(self, starts: jax.Array) -> dict[str, Any]:
        specs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._arrays
        )
        shown = jax.pure_callback(lambda: self._arrays, specs)
        # A copy for each row, as devices divide rows.
        rows = jax.tree.map(
            lambda x: jnp.broadcast_to(x[None], (len(starts), *x.shape)), shown
        )
        return {**rows, "starts": jnp.asarray(starts, jnp.int32)}

    def inputs(self, state: Any, given: Mapping[str, jax.Array]) -> dict[str, Any]:
        found: dict[str, Any] = dict(given)
        if PLACES in state:
            table, positions = state[PLACES].swapaxes(0, 1), given[PLACES]
            count = table.shape[2]
            # A text after images goes on where the largest position ends.
            later = positions + (jnp.max(table, (0, 2)) + 1 - count)[:, None]
            slots = jnp.clip(positions, 0, count - 1)[None]
            in_prompt = jnp.take_along_axis(table, slots, axis=2)
            found[PLACES] = jnp.where(positions < count, in_prompt, later[None])
        if SLOTS in state:
            slots = jnp.arange(given["attention_mask"].shape[1])[None]
            at = slots - state["starts"][:, None]
            places = state[SLOTS]
            is_there = (at >= 0) & (at < places.shape[1])
            at = jnp.clip(at, 0, places.shape[1] - 1)
            found[SLOTS] = jnp.take_along_axis(places, at, axis=1) & is_there
        if given["input_ids"].shape[1] > 1:
            # The module takes those of all rows, one row after the other.
            found[FEATURES] = jax.tree.map(
                lambda x: x.reshape(-1, *x.shape[2:]), state[FEATURES]
            )
        return found


def with_text(places: np.ndarray, length: int) -> np.ndarray:
    """Positions of a prompt, and of the text after it, int32 (3, length)."""
    later = places.max() + 1 + np.arange(length - places.shape[1], dtype=np.int32)
    later = np.broadcast_to(later, (len(places), len(later)))
    return np.concatenate([places, later], axis=1)
