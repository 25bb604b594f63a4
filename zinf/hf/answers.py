"""Where an answer lies among the tokens of a conversation."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from zinf.hf.template import apply_template

logger = logging.getLogger(__name__)
Span = tuple[int, int]


@dataclass
class Tally:
    """How many samples have an answer that begins inside a token, and the first one."""

    count: int = 0
    first: str = ""

    def add(self, where: str) -> None:
        self.first = self.first or where
        self.count += 1

    def warn(self) -> None:
        """Say the count once, after all samples; nothing if it is 0."""
        if self.count:
            logger.warning(
                "In %s samples (the first is %s) an answer begins inside a token, as "
                "the chat template ends a prompt with a space or has no token between "
                "a prompt and an answer. The token is not trained on, only those after "
                "it. A template whose generation prompt ends with a special token or a "
                "new line trains on whole answers.",
                f"{self.count:,}",
                self.first,
            )


def laid_out(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], **named: Any
) -> list[int]:
    """The tokens of a conversation."""
    how = {"tokenize": True, "return_dict": True}
    return apply_template(tokenizer, messages, **how, **named)["input_ids"]


def span_by_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Any],
    number: int,
    ids: Sequence[int],
    tools: Any,
) -> Span | None:
    """Where message `number` begins and ends, if that is between two tokens.

    None if the tokens of the messages up to there are others than those in `ids`.

    Args:
        ids: the tokens of all messages.
    """
    named = {"tools": tools, "add_generation_prompt": True}
    before, upto = laid_out(tokenizer, messages[:number], **named), ids
    if number + 1 < len(messages):
        upto = laid_out(tokenizer, messages[: number + 1], tools=tools)
    is_prefix = list(ids[: len(upto)]) == list(upto)
    if not is_prefix or list(ids[: len(before)]) != before:
        return None
    return len(before), len(upto)


def span_by_characters(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Any],
    number: int,
    ids: Sequence[int],
    tools: Any,
) -> Span | None:
    """The tokens of message `number` that have no character of another message.

    None if the template lays out the messages up to there in another way, or the
    tokenizer does not say which characters a token has (it is not a fast one).
    """
    if not tokenizer.is_fast:
        return None
    named = {"tools": tools, "tokenize": False}
    whole = apply_template(tokenizer, messages, **named)
    before = apply_template(
        tokenizer, messages[:number], add_generation_prompt=True, **named
    )
    upto = apply_template(tokenizer, messages[: number + 1], **named)
    how = {"tokenizer_kwargs": {"return_offsets_mapping": True}, "return_dict": True}
    found = apply_template(tokenizer, messages, tools=tools, **how)
    if not whole.startswith(before) or not whole.startswith(upto):
        return None
    if list(found["input_ids"]) != list(ids):
        return None
    return tokens_within(found["offset_mapping"], len(before), len(upto))


def tokens_within(offsets: Sequence[Span], begin: int, end: int) -> Span:
    """The tokens all of whose characters are from `begin` to `end`, as a range.

    Args:
        offsets: where each token begins and ends. Some tokenizers leave out spaces that
            begin a token, so it may begin where the one before ends.
    """
    first = last = 0
    reached = 0
    for number, (start, stop) in enumerate(offsets):
        if min(start, reached) < begin:
            first = number + 1
        if stop <= end:
            last = number + 1
        reached = max(reached, stop)
    return first, max(first, last)
