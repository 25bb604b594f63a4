"""Tokens of what an environment replies, which follow a turn of the model."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from zinf.core.rollouts.environment import Message, Reply, UnreadableReply
from zinf.hf.completion import end_tokens
from zinf.hf.model import Model
from zinf.hf.template import apply_template

# What a template calls a tool whose result has no name.
TOOL = "tool"


def reply_tokens(model: Model, reply: Reply) -> list[int]:
    """The tokens of a reply, behind the one that ended the turn of the model.

    A text stands as it is. Messages are laid out as the chat template does between the
    turn before and the next one, for which it asks: as TRL does, from a conversation
    with an empty turn. Nothing before them is tokenized again.

    Raises:
        UnreadableReply: the template refuses the messages, or they have no token.
    """
    text = reply if isinstance(reply, str) else _laid_out(model, reply)
    ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise UnreadableReply(
            f"the tokenizer makes no token of its reply {reply!r:.80}"
        )
    if max(ids) >= model.vocab_size:
        raise UnreadableReply(
            f"the tokenizer gives token {max(ids)} for its reply, and the model has "
            f"{model.vocab_size} words"
        )
    return ids


def check_template(model: Model) -> None:
    """Refuse a chat template that cannot lay out what a user says to a turn.

    Raises:
        ValueError: see above.
    """
    try:
        reply_tokens(model, [{"role": "user", "content": "1"}])
    except UnreadableReply as error:
        raise ValueError(
            f"{model.name}: an environment replies to conversations, and {error}. Give "
            "prompts as texts, or the model another chat template."
        ) from error


def _laid_out(model: Model, replies: Sequence[Message]) -> str:
    """The text from the end of an empty turn to the begin of the next."""
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    names = [x.get("name", TOOL) for x in replies if x["role"] == "tool"]
    if names:  # Templates refuse results of tools that were not called.
        call = {"name": names[0], "arguments": {}}
        turn["tool_calls"] = [{"type": "function", "function": call}]
    before = [{"role": "user", "content": "1"}, turn]
    try:
        first = _text(model, before[:1], asks=True)
        start = _text(model, before, asks=False)
        whole = _text(model, [*before, *replies], asks=True)
    except Exception as error:
        # A template is a program, and raises what it likes.
        raise UnreadableReply(
            f"the chat template refuses the reply {list(replies)!r:.80}: {error}"
        ) from error
    ends = _ends(model)
    start = _to_end_of_turn(start, len(commonprefix([first, start])), ends)
    if not whole.startswith(start):
        raise UnreadableReply(
            "the chat template lays a turn out otherwise when a reply follows, so the "
            "tokens of the reply cannot follow those that were drawn"
        )
    rest = whole[len(start) :]
    # A template may end a turn only when another follows; the model drew that end.
    own = next((end for end in ends if rest.startswith(end)), "")
    return rest.removeprefix(own)


def _text(model: Model, messages: Sequence[Mapping[str, Any]], *, asks: bool) -> str:
    given = [dict(x) for x in messages]
    named = {"tokenize": False, "add_generation_prompt": asks}
    return apply_template(model.tokenizer, given, **named)


def _to_end_of_turn(text: str, first: int, ends: Sequence[str]) -> str:
    """The text up to the end of its last turn, which begins at character `first`.

    A line feed behind that end, as many templates have it, is not drawn by the model.
    """
    places = [at + len(end) for end in ends if (at := text.rfind(end, first)) >= 0]
    return text[: max(places)] if places else text


@lru_cache(maxsize=1)
def _ends(model: Model) -> tuple[str, ...]:
    """The texts of the tokens that end a turn."""
    texts = model.tokenizer.convert_ids_to_tokens(list(end_tokens(model)))
    return tuple(text for text in texts if text)
