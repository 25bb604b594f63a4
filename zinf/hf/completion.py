"""Prompts as texts or conversations, and completions as texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zinf.core.text.json_text import from_json
from zinf.hf.engine import ModelEngine
from zinf.hf.model import Model
from zinf.hf.records import refuse_images, tools_of, with_content
from zinf.hf.template import apply_template
from zinf.hf.texts import prompt_ids
from zinf.inference import (
    Decoder,
    Drafts,
    Sampling,
    prompt_lookup,
    read_settings,
    token_ids,
)

SETTINGS = "generation_config.json"
NGRAM = "max_matching_ngram_size"
PROMPTS = "prompt (a text) or messages (a conversation)"


def settings_of(model: Model, given: Mapping[str, Any]) -> Sampling:
    """How a model samples: as the file beside it says, but for what is given.

    Args:
        given: settings by the names of `GenerationConfig`; None leaves one to the file.
            A temperature above 0 turns sampling on, and 0 turns it off.

    Raises:
        ValueError: a value is impossible, or the file is no JSON.
        NotImplementedError: a setting is not supported; see `read_settings`.
    """
    settings = _settings(model, given)
    temperature = given.get("temperature")
    if temperature is not None:
        settings["do_sample"] = temperature > 0
    settings["eos_token_id"] = _end_tokens(model, settings)
    return read_settings(settings)


def end_tokens(model: Model) -> tuple[int, ...]:
    """The tokens that end a text, by the file beside the model, or by the model.

    Raises:
        ValueError: the file is no JSON.
    """
    return token_ids(_end_tokens(model, _settings(model, {})))


def _end_tokens(model: Model, settings: Mapping[str, Any]) -> int | list[int] | None:
    given = settings.get("eos_token_id")
    if given is not None:
        return given
    text = model.config.get_text_config()
    own = list(token_ids(getattr(text, "eos_token_id", None)))
    return own or model.tokenizer.eos_token_id


def lookup_of(model: Model, given: Mapping[str, Any]) -> Drafts | None:
    """Drafts that repeat the text, if `prompt_lookup_num_tokens` asks for them.

    Args:
        given: see `settings_of`; 0 asks for none.

    Raises:
        ValueError: see `settings_of`.
    """
    settings = _settings(model, given)
    num_tokens = settings.get("prompt_lookup_num_tokens") or 0
    if not num_tokens:
        return None
    size = settings.get(NGRAM)
    return prompt_lookup(num_tokens, **({} if size is None else {NGRAM: size}))


def _settings(model: Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the file beside a model says, but for what is given; see `settings_of`."""
    path, settings = model.folder / SETTINGS, {}
    if path.is_file():
        try:
            settings = from_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}. Get it again.") from None
        if not isinstance(settings, dict):
            raise ValueError(f"{path} has {settings!r:.40}, no settings. Get it again.")
    return settings | {n: value for n, value in given.items() if value is not None}


def prompt_tokens(
    model: Model, line: Any, where: str, *, chat: bool, tokenizer: Any = None
) -> np.ndarray:
    """The tokens of a prompt.

    Args:
        line: an object with `prompt` or `messages`.
        where: for messages of errors.
        chat: lay out a `prompt` as what a user says, by the chat template.
        tokenizer: one that lays out images too; None: that of the model, for text.

    Raises:
        ValueError: the line has none of these fields, or the prompt is empty, or the
            tokenizer has no chat template.
    """
    if not isinstance(line, Mapping) or not ("prompt" in line or "messages" in line):
        found = f"a {type(line).__name__}"
        if isinstance(line, Mapping):
            found = ", ".join(map(str, line)) or "nothing"
        raise ValueError(f"{where}: a line must have {PROMPTS}; found {found}.")
    if tokenizer is None:
        refuse_images(line, where)
        tokenizer = model.tokenizer
    if "messages" in line or chat:
        messages = line.get("messages")
        if messages is None:
            messages = [{"role": "user", "content": line["prompt"]}]
        if tokenizer.chat_template is None:
            raise ValueError(
                f"{where}: {model.name} has no chat template, so it does not say how a "
                "conversation is laid out. Give a plain prompt."
            )
        tools = tools_of(line, where)
        if isinstance(messages, list):
            messages = with_content(messages, where)
        try:
            ids = apply_template(
                tokenizer,
                messages,
                tools=tools,
                tokenize=True,
                return_dict=True,
                add_generation_prompt=True,
            )["input_ids"]
        except Exception as error:
            # A template is a program, and raises what it likes.
            raise ValueError(
                f"{where}: the chat template refuses the conversation: {error}"
            ) from error
    else:
        text = line["prompt"]
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"{where}: prompt must be a text that is not empty; found {text!r:.40}."
            )
        ids = prompt_ids(tokenizer, text)
    if not ids:
        raise ValueError(f"{where}: the tokenizer makes no token of the prompt.")
    if max(ids) >= model.vocab_size:
        raise ValueError(
            f"{where}: the tokenizer gives token {max(ids)}, and the model has "
            f"{model.vocab_size} words. Use the tokenizer of this model."
        )
    return np.array(ids, np.int32)


def complete_texts(
    engine: ModelEngine,
    prompts: Sequence[np.ndarray],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    keys: jax.Array,
    rows: int,
    drafts: Drafts | None = None,
    decoder: Decoder | None = None,
    on_text: Callable[[str], None] | None = None,
) -> list[str]:
    """The text that the model writes after each prompt.

    Args:
        decoder: in place of the model's own.
        keys: a random key a prompt.
        drafts: guesses of next tokens; see `zinf.inference.Drafts`.
        on_text: called with each further part of the first text, as it is made.
    """
    words = _Words(engine.model.tokenizer, on_text)
    found = engine.generate(
        prompts,
        max_new_tokens=max_new_tokens,
        key=keys,
        rows=rows,
        drafts=drafts,
        decoder=decoder,
        on_token=None if on_text is None else words.add,
        **vars(sampling),
    )
    texts = [words.text(tokens) for tokens in found]
    if on_text is not None:
        words.finish(texts[0])
    return texts


class _Words:
    """Decodes tokens as they come; `on_text` gets each part of complete characters."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None):
        self.tokenizer, self.on_text = tokenizer, on_text
        self.tokens: list[int] = []
        self.told = ""

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def add(self, number: int, token: int) -> None:
        if number:
            return
        self.tokens.append(token)
        text = self.text(self.tokens)
        # The last character may need the bytes of further tokens.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.finish(text)

    def finish(self, text: str) -> None:
        if self.on_text is not None and text.startswith(self.told):
            self.on_text(text[len(self.told) :])
            self.told = text
