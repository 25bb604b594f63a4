"""Prompts with images that a model in training completes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zinf.core.engine.engine import Engine
from zinf.core.rollouts.beside import AbstractBeside
from zinf.core.rollouts.sizes import Prompt
from zinf.hf.engine import ModelEngine
from zinf.hf.images.completion import ImagePrompt, ShownImages
from zinf.hf.images.model import ImageModel
from zinf.hf.images.patches import PLACES
from zinf.hf.images.reader import ImageReader, Seen
from zinf.inference import Scored


def pieces_of(model: ImageModel, prompts: Sequence[Prompt]) -> list[int]:
    """Tiles or patches of the images of each prompt."""
    tokens = [np.count_nonzero(p.tokens == model.image_token) for p in prompts]
    return model.kind.num_pieces(np.array(tokens, np.int64)).tolist()


class ImagesOfPrompts(AbstractBeside):
    """The images of prompts, whose `beside` has the bytes of the files.

    Prompts are completed one after the other, as the rows of a cache share its images;
    the tower runs once for each prompt, with the weights of that time.

    Args:
        room: tiles or patches that a row has room for.
        length: tokens of a row.
    """

    def __init__(self, model: ImageModel, *, room: int, length: int) -> None:
        self._model, self._room, self._length = model, room, length
        self._reader = ImageReader(model)
        self._shown: ShownImages | None = None

    def spec(self, rows: int, length: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        return self._model.kind.specs(rows, self._room, length)

    def leaves(
        self, prompts: Sequence[Prompt], tokens: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        rows: list[Mapping[str, np.ndarray]] = []
        before, seen = None, Seen({}, ())
        for prompt, ids in zip(prompts, tokens, strict=True):
            if prompt is not before:
                before, seen = prompt, self._see(prompt)
            rows.append(self._filled(seen, ids, prompt.where))
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        tokens: Sequence[np.ndarray],
        *,
        key: jax.Array,
        num_samples: int = 1,
        **how: Any,
    ) -> list[list[Scored]]:
        if not key.ndim:
            numbers = np.arange(len(prompts) * num_samples)
            key = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        assert isinstance(engine, ModelEngine)
        if self._shown is None:
            self._shown = ShownImages(engine, self._length)
        found: list[list[Scored]] = []
        for number, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
            leaves = dict(self._filled(self._see(prompt), prompt.tokens, prompt.where))
            if PLACES in leaves:
                leaves[PLACES] = leaves[PLACES][:, : len(prompt.tokens)]
            self._shown.show(ImagePrompt(prompt.tokens, leaves))
            keys = key[number * num_samples :][:num_samples]
            how |= {"key": keys, "num_samples": num_samples}
            found += engine.sample([ids], decoder=self._shown.decoder, **how)
        return found

    def _see(self, prompt: Prompt) -> Seen:
        return self._reader.see(prompt.beside, prompt.where)

    def _filled(
        self, seen: Seen, ids: np.ndarray, where: str
    ) -> Mapping[str, np.ndarray]:
        leaves = self._reader.row(seen, ids, where)
        return self._model.kind.filled(leaves, self._room, self._length)
