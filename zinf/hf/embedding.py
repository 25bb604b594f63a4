"""Vectors of texts, as sentence-transformers makes them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.names import listed
from zinf.hf.encoder import FIRST, Encoder, Pooled, Pooling, load_encoder
from zinf.hf.model import in_stored_precision
from zinf.hf.prefill import Prefill, Row
from zinf.hf.reader import AbstractReader, Limit, as_object, missing
from zinf.hf.samples import Tokenizing, TooLong
from zinf.hf.scoring import row_of
from zinf.hf.sentence import Recipe, read_recipe

COLUMN = "embedding"


def embed(
    model: str | Path,
    texts: Sequence[str],
    config: ConfigSource = None,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
) -> np.ndarray:
    """The vectors of texts, by a model that need not fit in memory.

    A folder of `sentence-transformers` has its own pooling, layers and normalization;
    any other model has means of length 1.

    Args:
        model: a folder or a name on the hub.
        config: budgets and tiers, as for `open_model`.
        pooling: "mean", "last" or "cls", in place of the folder's.
        normalize: whether vectors have the length 1, in place of what the folder says.
        prompt: what stands before each text.
        prompt_name: of a prompt of the folder, in place of the one that it takes.
        max_length: most tokens of a text; None: as the folder, the model and its
            tokenizer say.
        too_long: longer texts: "truncate" cuts them, as sentence-transformers does, and
            "error" refuses them.

    Returns:
        float32 (texts, dims).

    Raises:
        ValueError: a text is none, or too long; or the folder has no such prompt.
        NotImplementedError: the folder has modules that zinf does not have.
        InfeasibleError: the budgets have no room for the weights.
    """
    if too_long == "drop":
        raise ValueError("too_long must be truncate or error: each text has a vector.")
    rest = {"prompt": prompt, "prompt_name": prompt_name}
    limits = {"max_length": max_length, "too_long": too_long}
    how = {"pooling": pooling, "normalize": normalize}
    with open_embedder(model, config, **how, **rest, **limits) as reader:
        lines = [{reader.column: text} for text in texts]
        asked = [reader.read(line, f"text {i}") for i, line in enumerate(lines, 1)]
        reader.limit.check()
        vectors = [answer[COLUMN] for answer in reader.answers(asked)]
        return np.array(vectors, np.float32)


def open_embedder(
    name: str | Path,
    config: ConfigSource = None,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    column: str = "text",
) -> "Embedder":
    """What makes vectors of lines with a model; see `embed`. It is a context manager.

    Args:
        column: of the lines, which has the text.
    """
    recipe = read_recipe(name, pooling)
    if normalize is not None:
        recipe = replace(recipe, normalizes=normalize)
    before = _prompt(recipe, name, prompt, prompt_name)
    model = in_stored_precision(load_encoder(recipe.model))
    limit = Limit.of(model, max_length, too_long)
    if max_length is None and recipe.max_length is not None:
        most = recipe.max_length
        if limit.max_length is not None:
            most = min(most, limit.max_length)
        limit = Limit(most, too_long)
    return Embedder(model, config, recipe, limit, before, column)


class Embedder(AbstractReader):
    """Vectors of texts.

    Attributes:
        recipe: how a text becomes a vector.
        prompt: what stands before each text.
        column: of lines, which has the text.
    """

    model: Encoder

    def __init__(
        self,
        model: Encoder,
        config: ConfigSource,
        recipe: Recipe,
        limit: Limit,
        prompt: str,
        column: str,
    ) -> None:
        self.model, self.recipe, self.limit = model, recipe, limit
        self.prompt, self.column = prompt, column
        self.prefill = Prefill(
            model,
            Pooled(model, recipe.pooling),
            config,
            padding={"input_ids": model.padding},
            longest=model.max_length,
        )
        self._how = Tokenizing.of(
            model, sequence_length=0, too_long="error", completion_only=True
        )
        skips = prompt and not recipe.keeps_prompt
        self._first = np.asarray(self._prompt_length() if skips else 0, np.int32)

    def read(self, line: Any, where: str) -> Row | None:
        needed = f"a text in the column {self.column!r}"
        line = as_object(line, where, needed)
        if self.column not in line:
            raise missing(line, where, needed)
        text, tokenizer = line[self.column], self.model.tokenizer
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: {self.column} must be a text; found {text!r:.40}."
            )
        whole = self.prompt + text
        whole = whole.strip() if self.recipe.strips else whole
        whole = whole.lower() if self.recipe.lowers else whole
        cut = tokens = tokenizer(whole, verbose=False)
        if len(tokens["input_ids"]) > (self.limit.max_length or np.inf):
            most = self.limit.max_length
            cut = tokenizer(whole, truncation=True, max_length=most)
        row = row_of(self.model, tokens, cut, self.limit, self._how, where)
        return row and replace(row, more={FIRST: self._first})

    def length(self, asked: Row | None) -> int:
        return 0 if asked is None else asked.length

    def columns(self, asked: Row | None) -> tuple[str, ...]:
        return (COLUMN,)

    def answers(self, asked: Sequence[Row | None]) -> list[dict[str, Any]]:
        """For each line {`embedding`: float32 (D,)}, or None if it was dropped."""
        rows = [row for row in asked if row is not None]
        if not rows:
            return [{COLUMN: None} for _ in asked]
        vectors = iter(self.recipe.finished(np.stack(self.prefill.run(rows))))
        return [{COLUMN: None if row is None else next(vectors)} for row in asked]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that vectors depend on, beside the model and the texts."""
        names = ("pooling", "normalizes", "strips", "lowers", "keeps_prompt")
        own = {name: getattr(self.recipe, name) for name in names}
        layers = [xxh3_128(x.weight.tobytes()).hexdigest() for x in self.recipe.layers]
        return own | {"prompt": self.prompt, "column": self.column, "layers": layers}

    def _prompt_length(self) -> int:
        """Number of tokens of the prompt, without a last one that ends every text."""
        tokenizer = self.model.tokenizer
        ids = tokenizer(self.prompt.strip()).input_ids
        return len(ids) - (ids[-1] in tokenizer.all_special_ids)


def _prompt(
    recipe: Recipe, name: str | Path, prompt: str | None, prompt_name: str | None
) -> str:
    """The text to put before each text: the prompt, or the one of that name.

    Raises:
        ValueError: there is no prompt of this name, or two are asked for.
    """
    if prompt is not None and prompt_name is not None:
        raise ValueError("Give one of prompt and prompt_name.")
    if prompt is not None:
        return prompt
    wanted = prompt_name or recipe.default_prompt
    if wanted is None:
        return ""
    if wanted not in recipe.prompts:
        known = listed(list(recipe.prompts)) if recipe.prompts else "none"
        raise ValueError(
            f"{name} has no prompt {wanted!r} (config_sentence_transformers.json); it "
            f"has {known}. Give the text itself as prompt."
        )
    return recipe.prompts[wanted]
