"""Turns a line of a fine-tuning file into tokens and labels.

A record holds a `text`, a `prompt` and its `completion`, or a conversation in
`messages` (with `tools`), which the tokenizer's chat template lays out; for other forms
see `zinf.hf.records`.
"""

import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase

from zinf.hf.answers import Span, Tally, laid_out, span_by_characters, span_by_tokens
from zinf.hf.batch import IGNORED
from zinf.hf.model import Model
from zinf.hf.records import (
    TRAIN_FLAGS,
    records,
    refuse_images,
    standard,
    tools_of,
    with_content,
)
from zinf.hf.template import apply_template
from zinf.hf.texts import prompt_ids, text_ids

logger = logging.getLogger(__name__)
KINDS = (
    "text, prompt and completion, messages, conversations (ShareGPT), or instruction "
    "and output (Alpaca)"
)
# The tag of a chat template around what an assistant says.
GENERATION = re.compile(r"\{%-?\s*generation\b")
NO_LAST_ANSWER = (
    "the chat template does not show where the last answer begins. Use one with "
    "{% generation %} tags, end the conversation with the assistant, or set "
    "data.completion_only to false."
)
NO_TAGS = (
    "the chat template has no {% generation %} tags, which show what the assistant "
    "says. Put a template with them beside the tokenizer (chat_template.jinja), or set "
    "data.assistant_only to false to train on the last answer."
)

# Which tokens of an answer have labels. It is part of the key of tokenized folders.
LABELLED = "tokens within its characters"
# Tokens, and their labels.
Sample = tuple[list[int], list[int]]
# What happens to a sample of too many tokens; see `data.too_long`.
TooLong = Literal["error", "truncate", "drop"]


@dataclass(frozen=True)
class Reading:
    """The samples that a line became, and whether one was cut.

    Attributes:
        samples: empty if the line is left out because it is too long.
        is_cut: whether a sample lost tokens at its end.
        beside: what is kept beside each sample, if anything is.
    """

    samples: tuple[Sample, ...]
    is_cut: bool = False
    beside: tuple[Any, ...] = ()


DROPPED = Reading(())


@dataclass(frozen=True)
class Tokenizing:
    """How lines become samples.

    Attributes:
        sequence_length: most tokens of a sample.
        too_long: what happens to longer samples: error refuses them; truncate cuts
            them, and leaves out those that then have no token to train on; drop leaves
            all of them out.
        completion_only: train on completions and on what the assistant says, and not on
            prompts and what the user says.
        vocab_size: of the model.
        assistant_only: conversations must have all that the assistant says marked by
            the chat template.
        begun_inside: counts the samples with an answer that begins inside a token.
    """

    tokenizer: PreTrainedTokenizerBase
    sequence_length: int
    too_long: TooLong
    completion_only: bool
    vocab_size: int
    assistant_only: bool = False
    begun_inside: Tally = field(default_factory=Tally, compare=False, kw_only=True)

    @classmethod
    def of(cls, model: Model, **settings: Any) -> Self:
        """How lines become samples of a model."""
        return cls(model.tokenizer, vocab_size=model.vocab_size, **settings)

    @property
    def settings(self) -> list[Any]:
        """The settings that tokens depend on, beside the line and the tokenizer."""
        others = ("tokenizer", "begun_inside")
        found = {n: x for n, x in vars(self).items() if n not in others}
        return [type(self).__name__, LABELLED, *found.items()]

    @classmethod
    def records(cls, path: Path) -> Iterator[tuple[Any, ...]]:
        """The arguments of `read` for each record of a file; see `records`."""
        return records(path)

    @classmethod
    def others(cls, paths: Sequence[Path]) -> list[tuple[str, int, int]]:
        """Files that records name: as they name them, size in bytes, time in ns."""
        del paths
        return []

    @contextmanager
    def beside(self, folder: Path) -> Generator[Callable[[Any], None], None, None]:
        """In the `with` block, a function that keeps more of a reading in a folder."""
        del folder
        yield lambda reading: None

    def check_kind(self, line: Any, where: str) -> None:
        """Refuse a line with more than text, unless it is read here."""
        refuse_images(line, where)

    def read(self, line: Any, where: str, folder: Path | None = None) -> Reading:
        """The samples of a line, one here: tokens and labels, themselves or -100.

        Args:
            line: the JSON value.
            where: file and number of the line, for messages.
            folder: from which paths in the line begin; a text has none.

        Raises:
            ValueError: the line has none of the known fields, is too long (with
                too_long error), or has no token to train on; the message names the
                line.
        """
        del folder
        ids, labels = self._tokens(line, where)
        is_long = len(ids) > self.sequence_length
        if is_long:
            if not self.is_cut(len(ids), where):
                return DROPPED
            ids, labels = ids[: self.sequence_length], labels[: self.sequence_length]
        # The first token is predicted by none.
        if all(label == IGNORED for label in labels[1:]):
            if is_long:
                return DROPPED
            raise ValueError(
                f"{where}: no token of the sample is trained on: it has {len(ids)} "
                "tokens, and all of them are of the prompt, or there is one alone. "
                "Leave the line out, or set data.completion_only to false."
            )
        self.check_words(ids, where)
        return Reading(((ids, labels),), is_long)

    def is_cut(self, length: int, where: str) -> bool:
        """Whether a sample of so many tokens, too many, is cut; else it is left out.

        Raises:
            ValueError: too_long is error.
        """
        if self.too_long == "error":
            raise ValueError(
                f"{where}: the sample has {length:,} tokens, and data.sequence_length "
                f"is {self.sequence_length:,}. Raise it, shorten the sample, or set "
                "data.too_long (--too-long): truncate cuts such samples, drop leaves "
                "them out."
            )
        return self.too_long == "truncate"

    def check_words(self, ids: Sequence[int], where: str) -> None:
        """Refuse tokens that the model does not have."""
        beyond = [token for token in ids if not 0 <= token < self.vocab_size]
        if beyond:
            raise ValueError(
                f"{where}: the tokenizer gives token {beyond[0]}, and the model has "
                f"{self.vocab_size} words. Use the tokenizer of this model."
            )

    def _tokens(self, line: Any, where: str) -> tuple[list[int], list[int]]:
        has_template = bool(self.tokenizer.chat_template)
        self.check_kind(line, where)
        line = standard(line, where, has_template=has_template)
        if not isinstance(line, Mapping):
            raise ValueError(
                f"{where}: a line must be a JSON object with {KINDS}; found a "
                f"{type(line).__name__}."
            )
        if "messages" in line:
            return self.conversation(line["messages"], tools_of(line, where), where)
        if "prompt" in line and "completion" in line:
            prompt, completion = line["prompt"], line["completion"]
            if isinstance(prompt, list) and isinstance(completion, list):
                return self.conversation(
                    [*prompt, *completion],
                    tools_of(line, where),
                    where,
                    num_before=len(prompt),
                )
            _check_text(prompt, "prompt", where)
            _check_text(completion, "completion", where)
            return self._joined(
                prompt_ids(self.tokenizer, prompt), self._ended(completion)
            )
        if "text" in line:
            _check_text(line["text"], "text", where)
            ids = self._closed(text_ids(self.tokenizer, line["text"]))
            return ids, list(ids)
        if "chosen" in line and "rejected" in line:
            raise ValueError(
                f"{where}: chosen and rejected are preferences, which objective sft "
                "does not take. Set data.objective to dpo (zinf finetune --objective "
                "dpo)."
            )
        found = ", ".join(map(str, line)) or "nothing"
        raise ValueError(f"{where}: a line must have {KINDS}; found {found}.")

    def _joined(
        self, prompt: list[int], completion: list[int]
    ) -> tuple[list[int], list[int]]:
        hidden = [IGNORED] * len(prompt) if self.completion_only else prompt
        return [*prompt, *completion], [*hidden, *completion]

    def _ended(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return self._closed(ids)

    def _closed(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def conversation(
        self, messages: Any, tools: Any, where: str, *, num_before: int = 0
    ) -> tuple[list[int], list[int]]:
        """The tokens and labels of a conversation.

        Args:
            num_before: the first messages, which are a prompt: none is trained on.
        """
        template = self.tokenizer.chat_template
        if not template:
            raise ValueError(
                f"{where} has messages, and the tokenizer has no chat template. Put "
                "chat_template.jinja of the model beside its tokenizer, or give prompt "
                "and completion."
            )
        _check_messages(messages, where)
        messages = with_content(messages, where)
        is_trained = _trained_messages(messages, num_before, where)
        messages = [
            {n: x for n, x in message.items() if n not in TRAIN_FLAGS}
            for message in messages
        ]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        has_tags = GENERATION.search(str(template)) is not None
        if self.assistant_only and not has_tags:
            raise ValueError(f"{where}: {NO_TAGS}")
        ends_with_answer = len(messages) > 1 and messages[-1]["role"] == "assistant"
        if self.completion_only and not has_tags and not ends_with_answer:
            raise ValueError(f"{where}: {NO_LAST_ANSWER}")
        try:
            if not self.completion_only and not self.assistant_only:
                ids = laid_out(self.tokenizer, messages, tools=tools)
                return ids, list(ids)
            if has_tags and all(is_trained[i] for i in answers):
                return self._by_tags(messages, tools)
            ids = laid_out(self.tokenizer, messages, tools=tools)
            spans = self._spans(messages, answers, ids, tools, where)
        except Exception as error:
            # A template is a program, and raises what it likes.
            raise ValueError(
                f"{where}: the chat template refuses the conversation: {error}"
            ) from error
        if ends_with_answer and spans[answers[-1]] is None:
            raise ValueError(f"{where}: {NO_LAST_ANSWER}")
        hidden = [i for i in answers if spans[i] is None]
        if hidden and not all(is_trained):
            raise ValueError(
                f"{where}: the chat template does not show where answer "
                f"{hidden[0] + 1} of the conversation begins, so parts of it cannot be "
                "left out of training. Use a template with {% generation %} tags or "
                "give the conversation up to each answer as a line of its own."
            )
        if hidden:
            _say_left_out(str(template))
        labels = [IGNORED] * len(ids)
        for i in answers:
            span = spans[i]
            if span is not None and is_trained[i]:
                labels[slice(*span)] = ids[slice(*span)]
        return ids, labels

    def _spans(
        self,
        messages: Sequence[Any],
        answers: Sequence[int],
        ids: list[int],
        tools: Any,
        where: str,
    ) -> dict[int, Span | None]:
        """Where each answer begins and ends among the tokens of the conversation.

        None for one before which the template lays out the messages in another way.
        """
        given = self.tokenizer, messages
        spans = {i: span_by_tokens(*given, i, ids, tools) for i in answers}
        inside = {
            i: span_by_characters(*given, i, ids, tools)
            for i, span in spans.items()
            if span is None
        }
        if any(inside.values()):
            self.begun_inside.add(where)
        return spans | inside

    def _by_tags(self, messages: Any, tools: Any) -> tuple[list[int], list[int]]:
        found = apply_template(
            self.tokenizer,
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = found["input_ids"], found["assistant_masks"]
        return ids, [x if m else IGNORED for x, m in zip(ids, mask, strict=True)]


def _trained_messages(
    messages: Sequence[Mapping[str, Any]], num_before: int, where: str
) -> list[bool]:
    """Whether each message may be trained on, as its `train`, `weight` or `loss` says.

    Raises:
        ValueError: a flag is neither true nor false, 0 nor 1.
    """
    found = []
    for number, message in enumerate(messages):
        flags = {name: message[name] for name in TRAIN_FLAGS if name in message}
        for name, flag in flags.items():
            if flag not in (0, 1):
                raise ValueError(
                    f"{where}: {name} of message {number + 1} is {flag!r}; it must be "
                    "true, false, 0 or 1. Other weights of messages are not supported."
                )
        found.append(number >= num_before and all(flags.values()))
    return found


@cache
def _say_left_out(template: str) -> None:
    """Warn once for each chat template; there may be millions of lines."""
    logger.warning(
        "The chat template (%.40r ...) lays out earlier answers in another way when "
        "more messages follow. Such answers are not trained on, only later ones. A "
        "template with {%% generation %%} tags shows all.",
        template,
    )


def _check_text(value: Any, name: str, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"{where}: {name} must be a text that is not empty; found {value!r:.40}."
        )


def _check_messages(messages: Any, where: str) -> None:
    is_list = isinstance(messages, list) and messages
    if not is_list or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ValueError(
            f"{where}: messages must be a list of objects with role and content; "
            f"found {messages!r:.60}."
        )
