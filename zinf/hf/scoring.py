"""Scores of lines: log-likelihoods, the best of some choices, and classes."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from zinf.core.engine.initialize import ConfigSource
from zinf.core.interchange.names import listed
from zinf.hf.adapter import read_adapter
from zinf.hf.answers import laid_out
from zinf.hf.batch import IGNORED
from zinf.hf.completion import prompt_tokens
from zinf.hf.folder import find_folder
from zinf.hf.heads import HeadModel, load_head
from zinf.hf.images.model import ImageModel, load_with_images
from zinf.hf.images.reader import ImageReader
from zinf.hf.images.rows import ImagesBeside
from zinf.hf.likelihood import Request, TokenScores, scored
from zinf.hf.model import Model, in_stored_precision, load_as_stored
from zinf.hf.module import read_config
from zinf.hf.prefill import Prefill, Row
from zinf.hf.reader import AbstractReader, Limit, as_object, check_text, missing
from zinf.hf.records import (
    has_images,
    refuse_images,
    standard,
    tools_of,
    with_content,
)
from zinf.hf.samples import Tokenizing, TooLong
from zinf.hf.texts import text_ids

OF_TEXTS = "text, prompt and completion, messages, or prompt and choices"
OF_CLASSES = "text (and maybe text_pair) or messages"
# Outputs of a tokenizer that are given to a module, if it takes them.
TOKENS = ("input_ids", "token_type_ids")
MASK = "attention_mask"


def score(
    model: str | Path,
    lines: Sequence[Mapping[str, Any]],
    config: ConfigSource = None,
    *,
    choices: Sequence[str] = (),
    chat: bool = False,
    max_length: int | None = None,
    too_long: TooLong = "error",
    base: str | Path | None = None,
) -> list[dict[str, Any]]:
    """What a model thinks of texts: log-likelihoods, choices or classes.

    Each line is answered by itself, with weights that need not fit in memory. Of a
    causal language model a line has one of

    * `text`: all tokens but the first are scored, given those before them. A tokenizer
      that begins texts with a token of its own has all of the text scored.
    * `prompt` and `completion`: the completion is scored, given the prompt.
    * `messages`: the last one, of the assistant, is scored as the chat template has it.
    * `prompt` (or `messages` that end with the user) and `choices`, a list of texts.

    Conversations may have images, as for fine-tuning, if the model reads them.

    Nothing is added behind a text or a completion, such as a token that ends texts. Of
    a classifier a line has `text`, maybe `text_pair`, or `messages`.

    Args:
        model: a folder or a name on the hub; also of an adapter of a language model.
        config: budgets and tiers, as for `open_model`.
        choices: of all lines that have none of their own, as they follow the prompt:
            with their spaces.
        chat: lay out a `prompt` as what a user says, by the chat template.
        max_length: most tokens of a line; None: what the model was made for.
        too_long: longer lines: "error" refuses them, "truncate" cuts them at their
            beginning (a text that is classified: at its end), "drop" gives None.
        base: of an adapter, in place of the one that it names.

    Returns:
        for each line `log_likelihood` (nats) and `num_tokens`, how many are scored; or
        with choices `log_likelihoods`, `probabilities` (which add up to 1) and `best`;
        or of a classifier `probabilities` by the name of the class and `best`, of one
        with a single output `score`, and of a regression `scores` by name.

    Raises:
        ValueError: a line lacks a column, or is too long; or the model is neither a
            causal language model nor a classifier of texts.
        InfeasibleError: the budgets have no room for the weights.
    """
    rest: dict[str, Any] = {"choices": choices, "chat": chat, "base": base}
    if any(map(has_images, lines)):
        rest["images_from"] = Path()
    limits = {"max_length": max_length, "too_long": too_long}
    with open_scorer(model, config, **rest, **limits) as reader:
        asked = [reader.read(line, f"line {i}") for i, line in enumerate(lines, 1)]
        reader.limit.check()
        return reader.answers(asked)


def open_scorer(
    name: str | Path,
    config: ConfigSource = None,
    *,
    choices: Sequence[str] = (),
    chat: bool = False,
    max_length: int | None = None,
    too_long: TooLong = "error",
    base: str | Path | None = None,
    images_from: Path | None = None,
) -> AbstractReader:
    """What scores lines with a model; see `score`. It is a context manager.

    Args:
        images_from: lines may have images, and paths of those begin in this folder;
            None: lines have text alone.
    """
    if images_from is not None:
        seeing = in_stored_precision(load_with_images(name, base=base))
        limit = Limit.of(seeing, max_length, too_long)
        return ImageScorer(seeing, config, limit, choices, images_from, chat=chat)
    folder = find_folder(name)
    kinds: list[str] = []
    # An adapter is of a language model; its base is looked at when that is loaded.
    if read_adapter(folder) is None:
        kinds += read_config(folder).architectures or ()
    heads = set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
    if heads.intersection(kinds):
        if choices or chat:
            raise ValueError(
                f"{name} is a {kinds[0]}, which has classes of its own "
                "(config.json). Leave choices and chat out."
            )
        found = in_stored_precision(load_head(name))
        return Classifier(found, config, Limit.of(found, max_length, too_long))
    writers = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if kinds and not writers.intersection(kinds):
        raise ValueError(
            f"{name} is a {listed(kinds)} (config.json), and scores need the "
            "head of a causal language model or of a classifier of texts. Name such a "
            "model; vectors of texts are made by zinf embed."
        )
    model = load_as_stored(name, base=base)
    limit = Limit.of(model, max_length, too_long)
    return Scorer(model, config, limit, choices, chat=chat)


@dataclass(frozen=True)
class Asked:
    """The requests of a line: one, or one for each choice.

    Attributes:
        requests: none if the line is dropped.
        choices: None if the line is a text.
    """

    requests: tuple[Request, ...]
    choices: tuple[str, ...] | None = None


class Scorer(AbstractReader):
    """Log-likelihoods by a causal language model."""

    # Lays out conversations with images; None: there are none.
    _layout: Any = None

    def __init__(
        self,
        model: Model,
        config: ConfigSource,
        limit: Limit,
        choices: Sequence[str],
        *,
        chat: bool,
    ) -> None:
        self.model, self.limit, self._chat = model, limit, chat
        self._choices = tuple(choices)
        if choices:
            _check_choices(list(choices), "choices")
        function, longest = TokenScores(model), model.max_length
        self.prefill = Prefill(model, function, config, longest=longest)
        given: dict[str, Any] = {"sequence_length": 0, "too_long": "error"}
        self._how = Tokenizing.of(model, **given, completion_only=True)

    def read(self, line: Any, where: str) -> Asked:
        line, tokenizer = as_object(line, where, OF_TEXTS), self.model.tokenizer
        has_template = bool(tokenizer.chat_template)
        line = standard(line, where, has_template=has_template)
        choices = line.get("choices", self._choices)
        if choices:
            _check_choices(choices, f"{where}: choices")
            context = self._prompt(line, where)
            ends = [self._ids(text) for text in choices]
            return self._asked(context, ends, where, tuple(choices))
        if "messages" in line:
            context, end = self._conversation(line, where)
        elif "prompt" in line and "completion" in line:
            text = check_text(line["completion"], "completion", where)
            context, end = self._prompt(line, where), self._ids(text)
        elif "text" in line:
            ids = text_ids(tokenizer, check_text(line["text"], "text", where))
            context, end = ids[:1], ids[1:]
        else:
            raise missing(line, where, OF_TEXTS)
        return self._asked(context, [end], where)

    def length(self, asked: Asked) -> int:
        # The last token is predicted, and not read.
        return max((len(x.tokens) - 1 for x in asked.requests), default=0)

    def columns(self, asked: Asked) -> tuple[str, ...]:
        if asked.choices is None:
            return "log_likelihood", "num_tokens"
        return "log_likelihoods", "probabilities", "best"

    def answers(self, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        requests = [request for each in asked for request in each.requests]
        scores = iter(scored(self.prefill, requests))
        found = []
        for each in asked:
            if not each.requests:
                found.append(dict.fromkeys(self.columns(each)))
                continue
            totals = [next(scores).log_likelihood for _ in each.requests]
            if each.choices is None:
                values: tuple[Any, ...] = totals[0], each.requests[0].num_scored
            else:
                shares = _softmax(np.array(totals))
                best = each.choices[int(np.argmax(totals))]
                values = totals, shares.tolist(), best
            found.append(dict(zip(self.columns(each), values, strict=True)))
        return found

    def _asked(
        self,
        context: Sequence[int],
        ends: Sequence[Sequence[int]],
        where: str,
        choices: tuple[str, ...] | None = None,
    ) -> Asked:
        """The requests that score each of `ends` after the tokens of `context`."""
        if not context or not all(ends):
            raise ValueError(
                f"{where}: what comes first has {len(context):,} tokens, and what is "
                f"scored {min(map(len, ends)):,}; both must have some, as nothing "
                "predicts the first token. Leave the line out."
            )
        for ids in (context, *ends):
            self._how.check_words(ids, where)
        longest = max(map(len, ends))
        if self.limit.exceeds(len(context) + longest, where):
            if self.limit.too_long == "drop":
                return Asked((), choices)
            assert self.limit.max_length is not None
            # At least one token of the context stays, which predicts the next.
            room = self.limit.max_length - 1
            context = [*context, *(ends[0] if len(ends) == 1 else ())]
            if len(ends) == 1:
                context, ends = _parted(context, min(longest, room), room + 1)
            elif longest > room:
                raise ValueError(
                    f"{where}: a choice has {longest:,} tokens, which leaves no room "
                    f"for a prompt in max_length = {room + 1:,}. Shorten the choices."
                )
            else:
                context = context[-(room + 1 - longest) :]
        return Asked(
            tuple(Request((*context, *end), len(end)) for end in ends), choices
        )

    def _prompt(self, line: Mapping[str, Any], where: str) -> list[int]:
        given = {"chat": self._chat, "tokenizer": self._layout}
        return prompt_tokens(self.model, line, where, **given).tolist()

    def _ids(self, text: str) -> list[int]:
        return self.model.tokenizer(text, add_special_tokens=False).input_ids

    def _conversation(
        self, line: Mapping[str, Any], where: str
    ) -> tuple[list[int], list[int]]:
        """The tokens of a conversation before its last answer, and those of it."""
        messages = line["messages"]
        is_list = isinstance(messages, list) and messages
        last = messages[-1] if is_list else None
        if not isinstance(last, Mapping) or last.get("role") != "assistant":
            raise ValueError(
                f"{where}: messages must be a list whose last message is of the "
                "assistant, which is scored; or give choices of what may follow."
            )
        before = [
            {**m, "train": False} if m.get("role") == "assistant" else m
            for m in messages[:-1]
        ]
        tools = tools_of(line, where)
        ids, labels = self._how.conversation([*before, last], tools, where)
        places = [i for i, label in enumerate(labels) if label != IGNORED]
        if not places or not places[0]:
            raise ValueError(
                f"{where}: the last answer has no token that follows others."
            )
        return ids[: places[0]], ids[places[0] : places[-1] + 1]


class ImageScorer(Scorer):
    """Log-likelihoods by a model that reads images beside text.

    Args:
        folder: from which paths of images begin.

    Raises:
        ValueError: lines would be cut, and with them images.
    """

    def __init__(
        self,
        model: ImageModel,
        config: ConfigSource,
        limit: Limit,
        choices: Sequence[str],
        folder: Path,
        *,
        chat: bool,
    ) -> None:
        if limit.too_long == "truncate":
            raise ValueError(
                "too_long (--too-long) is truncate, and the lines have images, which "
                "would lose tokens. Set it to error or drop."
            )
        super().__init__(model, config, limit, choices, chat=chat)
        self._reader, self._folder = ImageReader(model), folder

    def read(self, line: Any, where: str) -> Asked:
        line = as_object(line, where, OF_TEXTS)
        line, images, seen = self._reader.read(line, where, self._folder)
        one = copy(self)
        one._layout = self._reader.layout(seen)
        one._how = replace(self._how, tokenizer=one._layout)
        asked = Scorer.read(one, line, where)
        if not images or not asked.requests:
            return asked
        ids = np.array(asked.requests[0].tokens, np.int32)
        count = len(self._reader.row(seen, ids, where)["pixel_values"])
        beside = ImagesBeside(self._reader, images, count, where)
        requests = tuple(replace(x, beside=beside) for x in asked.requests)
        return replace(asked, requests=requests)


class Classifier(AbstractReader):
    """Classes, or numbers, by a classifier of texts."""

    model: HeadModel

    def __init__(self, model: HeadModel, config: ConfigSource, limit: Limit) -> None:
        self.model, self.limit = model, limit
        padding = {"input_ids": model.padding}
        self.prefill = Prefill(
            model, model.logits, config, padding=padding, longest=model.max_length
        )
        self._how = Tokenizing.of(
            model, sequence_length=0, too_long="error", completion_only=True
        )

    def read(self, line: Any, where: str) -> Row | None:
        line, tokenizer = as_object(line, where, OF_CLASSES), self.model.tokenizer
        refuse_images(line, where)
        if "messages" in line:
            messages = with_content(line["messages"], where)
            ids = laid_out(tokenizer, messages, tools=tools_of(line, where))
            tokens, most = {"input_ids": ids}, self.limit.max_length
            cut = {"input_ids": ids[-most:] if most else ids}
        elif "text" in line:
            texts = [check_text(line["text"], "text", where)]
            if line.get("text_pair") is not None:
                texts.append(check_text(line["text_pair"], "text_pair", where))
            tokens = tokenizer(*texts, verbose=False)
            cut = tokens
            if len(tokens["input_ids"]) > (self.limit.max_length or np.inf):
                cut = tokenizer(
                    *texts, truncation=True, max_length=self.limit.max_length
                )
        else:
            raise missing(line, where, OF_CLASSES)
        return row_of(self.model, tokens, cut, self.limit, self._how, where)

    def length(self, asked: Row | None) -> int:
        return 0 if asked is None else asked.length

    def columns(self, asked: Row | None) -> tuple[str, ...]:
        if self.model.config.num_labels == 1:
            return ("score",)
        is_number = self.model.config.problem_type == "regression"
        return ("scores",) if is_number else ("probabilities", "best")

    def answers(self, asked: Sequence[Row | None]) -> list[dict[str, Any]]:
        rows = [row for row in asked if row is not None]
        logits = iter(self.prefill.run(rows))
        return [
            dict.fromkeys(self.columns(row)) if row is None else self._of(next(logits))
            for row in asked
        ]

    def _of(self, logits: np.ndarray) -> dict[str, Any]:
        values, config = logits.astype(np.float64), self.model.config
        if config.num_labels == 1:
            return {"score": float(values[0])}
        names = self.model.labels
        if config.problem_type == "regression":
            return {"scores": dict(zip(names, values.tolist(), strict=True))}
        is_several = config.problem_type == "multi_label_classification"
        shares = 1 / (1 + np.exp(-values)) if is_several else _softmax(values)
        return {
            "probabilities": dict(zip(names, shares.tolist(), strict=True)),
            "best": names[int(values.argmax())],
        }


def row_of(
    model: HeadModel,
    tokens: Mapping[str, Any],
    cut: Mapping[str, Any],
    limit: Limit,
    how: Tokenizing,
    where: str,
) -> Row | None:
    """The row of a text, from its tokenizer's output; None if the text is dropped.

    Args:
        cut: the same, at most as long as the limit.

    Raises:
        ValueError: there is no token, or one that the model does not know.
    """
    if not len(tokens["input_ids"]):
        raise ValueError(f"{where}: the tokenizer makes no token of the text.")
    if limit.exceeds(len(tokens["input_ids"]), where):
        if limit.too_long == "drop":
            return None
        tokens = cut
    how.check_words(tokens["input_ids"], where)
    return as_row(model, tokens)


def as_row(model: HeadModel, tokens: Mapping[str, Any]) -> Row:
    """What a tokenizer made of a text, as far as the model takes it."""
    names = [n for n in TOKENS if n in tokens and n in model.arguments]
    found = {name: list(tokens[name]) for name in names}
    # Not all tokenizers make one, and rows are filled up.
    if MASK in model.arguments:
        found[MASK] = [1] * len(found["input_ids"])
    return Row(found)


def _check_choices(choices: Any, what: str) -> None:
    is_list = isinstance(choices, list | tuple) and len(choices) > 1
    if not is_list or not all(isinstance(x, str) and x for x in choices):
        raise ValueError(
            f"{what} must be a list of at least two texts that are not empty; found "
            f"{choices!r:.60}."
        )
    if len(set(choices)) < len(choices):
        raise ValueError(f"{what} must be different texts; found {choices!r:.60}.")


def _parted(
    ids: Sequence[int], num_scored: int, most: int
) -> tuple[Sequence[int], list[Sequence[int]]]:
    """The last `most` tokens, split into those before the scored ones, and these."""
    kept = ids[-most:]
    return kept[: len(kept) - num_scored], [kept[len(kept) - num_scored :]]


def _softmax(values: np.ndarray) -> np.ndarray:
    raised = np.exp(values - values.max())
    return raised / raised.sum()
