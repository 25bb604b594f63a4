"""Groups prompts so that each sequence has shapes that depend on itself alone."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zinf.inference.rows import LEAST_TOKENS, Shape


@dataclass(frozen=True)
class Request:
    """One sequence to complete.

    Attributes:
        number: its place among the prompts.
        words: its random key as 32-bit words.
        num_written: how many of the tokens, the last ones, were written before.
    """

    number: int
    tokens: np.ndarray
    words: np.ndarray
    num_written: int = 0


@dataclass(frozen=True)
class Part:
    """Tokens that sequences of one shape get in one run.

    Attributes:
        first, end: the first new token is number `first` of its sequence, and all are
            before `end`.
    """

    shape: Shape
    first: int
    end: int


def as_tokens(prompts: Sequence[Any]) -> list[np.ndarray]:
    """Prompts as int32 arrays.

    Raises:
        ValueError: a prompt is empty, or no sequence of whole numbers.
    """
    found = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise ValueError(
                f"Prompt {number} is a text. engine.generate takes tokens: use the "
                "tokenizer of the model first."
            )
        tokens = np.asarray(prompt)
        if tokens.size == 0:
            raise ValueError(
                f"Prompt {number} is empty. Give at least one token, such as the one "
                "that begins a text (bos_token_id)."
            )
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"Prompt {number} is {tokens.dtype}{list(tokens.shape)}; a prompt is a "
                "sequence of token ids."
            )
        if tokens.min() < 0:
            raise ValueError(f"Prompt {number} has the token {tokens.min()}, below 0.")
        if tokens.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"Prompt {number} has the token {tokens.max()}, and tokens are at most "
                f"{np.iinfo(np.int32).max:,}."
            )
        found.append(tokens.astype(np.int32))
    return found


def check_lengths(
    prompts: Sequence[np.ndarray], max_new_tokens: int, max_length: int | None
) -> None:
    """Raise if a sequence may become longer than the model allows."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; found {max_new_tokens}.")
    for number, tokens in enumerate(prompts):
        check_length(len(tokens), max_new_tokens, max_length, f"Prompt {number}")


def check_length(
    length: int, max_new_tokens: int, max_length: int | None, name: str
) -> None:
    """Raise if a prompt of so many tokens may become longer than the model allows."""
    if max_length is not None and length + max_new_tokens > max_length:
        room = max_length - length
        lower = f", or lower max_new_tokens to at most {room:,}" if room > 0 else ""
        raise ValueError(
            f"{name} has {length:,} tokens, and with max_new_tokens = "
            f"{max_new_tokens:,} they are more than the {max_length:,} that the model "
            f"was made for. Shorten the prompt{lower}."
        )


def bucket(length: int) -> int:
    """The slots for a prompt of this length: a power of two."""
    return max(LEAST_TOKENS, 1 << (length - 1).bit_length())


def by_part(
    requests: Sequence[Request],
    rows: int,
    max_new_tokens: int,
    switches_at: int | None,
    num_guesses: int = 0,
) -> dict[Part, list[Request]]:
    """The requests of each part. That of a sequence does not depend on the others.

    Args:
        num_guesses: of a sequence, which take slots of the cache beyond its end.
        max_new_tokens: of a sequence, with those that were written before.
        switches_at: see `Decoder`. A part of a sequence ends with the token that makes
            it longer.
    """
    groups: dict[Part, list[Request]] = defaultdict(list)
    for request in requests:
        first, length = request.num_written, len(request.tokens)
        end = max_new_tokens
        if switches_at is not None and length <= switches_at:
            end = min(end, first + switches_at + 1 - length)
        shape = shape_of(rows, length, max_new_tokens - first + num_guesses)
        groups[Part(shape, first, end)].append(request)
    return groups


def shape_of(rows: int, length: int, max_new_tokens: int) -> Shape:
    """The shape of a microbatch in which a prompt of so many tokens runs."""
    prompt = bucket(length)
    # The last new token is never read, so it has no slot.
    slots = -(-(prompt + max_new_tokens - 1) // LEAST_TOKENS) * LEAST_TOKENS
    return Shape(rows, prompt, slots)
