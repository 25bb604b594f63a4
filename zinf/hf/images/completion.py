"""Prompts with images, and the model that goes on after them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.hf.completion import prompt_tokens
from zinf.hf.decoder import AbstractBeside
from zinf.hf.engine import ModelEngine, decoder_for
from zinf.hf.images.model import FEATURES, ImageModel
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
    model, adapted = engine.model, engine.adapted
    assert isinstance(model, ImageModel)
    leaves = {n: x[None] for n, x in prompt.leaves.items() if n != PLACES}
    function = model.features if adapted is None else adapted.applied(model.features)
    features = engine.apply(function, leaves)
    beside = _Images(features, prompt.leaves.get(PLACES))
    return decoder_for(model, adapted, engine.planner, beside)


class _Images(AbstractBeside):
    """The features of the images of one prompt.

    Args:
        features: of `ImageModel.features`.
        places: positions of the tokens of the prompt, int32 (3, tokens); None if they
            are those of a text.
    """

    def __init__(self, features: Any, places: np.ndarray | None) -> None:
        self._features, self._places = features, places

    def state(self, starts: jax.Array) -> dict[str, Any]:
        del starts  # The images are of one prompt, which rows share.
        found = {FEATURES: jax.tree.map(jnp.asarray, self._features)}
        if self._places is not None:
            found[PLACES] = jnp.asarray(self._places)
        return found

    def inputs(self, state: Any, given: Mapping[str, jax.Array]) -> dict[str, Any]:
        found: dict[str, Any] = dict(given)
        if PLACES in state:
            table, positions = state[PLACES], given[PLACES]
            count = table.shape[1]
            # A text after images goes on where the largest position ends.
            later = positions + (jnp.max(table) + 1 - count)
            in_prompt = jnp.take(table, jnp.clip(positions, 0, count - 1), axis=1)
            found[PLACES] = jnp.where(positions < count, in_prompt, later[None])
        if given["input_ids"].shape[1] > 1:
            found[FEATURES] = state[FEATURES]
        return found
