"""Guesses of next tokens, all of which one pass of the model checks.

A guess is kept if it is the token that would have been drawn at its place, with the key
and number of that place. So the text is the one without drafts, and only the number of
passes differs (Leviathan et al., arXiv:2211.17192, accept with the same probability).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Guess = Callable[[Sequence[int], Sequence[np.ndarray]], Sequence[Any]]


@dataclass(frozen=True)
class Drafts:
    """Where guesses come from, and how many of them a pass checks.

    Attributes:
        num_tokens: guesses a sequence and pass. A pass computes `num_tokens + 1` tokens
            of each sequence, and reads each weight once.
        guess: `(numbers, texts) -> guesses`: the likely next tokens of each text, as
            many as it likes; those beyond `num_tokens` are not used. `numbers` are the
            places of the prompts, and `texts` int32 (T,), prompts with what was written
            so far.
    """

    num_tokens: int
    guess: Guess

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(
                f"Drafts must have at least 1 token; found {self.num_tokens}. Leave "
                "drafts out to generate without."
            )

    def guesses(
        self, numbers: Sequence[int], texts: Sequence[np.ndarray], vocab_size: int
    ) -> np.ndarray:
        """Guesses for each text, int32 (B, num_tokens).

        Where no token was guessed stands the last token of the text.

        Raises:
            ValueError: there are fewer or more guesses than texts, or a token is not in
                the vocabulary of the model.
        """
        given = list(self.guess(numbers, texts))
        if len(given) != len(texts):
            raise ValueError(
                f"Drafts for {len(texts)} texts must be {len(texts)} sequences of "
                f"tokens; guess returned {len(given)}."
            )
        found = np.zeros((len(texts), self.num_tokens), np.int32)
        for row, (number, text, tokens) in enumerate(
            zip(numbers, texts, given, strict=True)
        ):
            own = np.asarray(tokens)[: self.num_tokens]
            outside = [int(x) for x in own if not 0 <= x < vocab_size]
            if outside:
                raise ValueError(
                    f"The draft of prompt {number} has token {outside[0]}, and the "
                    f"model has {vocab_size:,} words. Drafts must come from a model or "
                    "a text with the same vocabulary."
                )
            found[row] = text[-1]
            found[row, : len(own)] = own
        return found


def prompt_lookup(num_tokens: int, *, max_matching_ngram_size: int = 2) -> Drafts:
    """Drafts that repeat the text: what followed its last tokens when they last came.

    The names are those of `transformers`' `GenerationConfig`.

    Args:
        max_matching_ngram_size: the most of the last tokens that are looked for.
    """
    if max_matching_ngram_size < 1:
        raise ValueError(
            f"max_matching_ngram_size must be at least 1; found "
            f"{max_matching_ngram_size}."
        )

    def guess(
        numbers: Sequence[int], texts: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        del numbers
        return [
            _after_match(text, max_matching_ngram_size, num_tokens) for text in texts
        ]

    return Drafts(num_tokens, guess)


def _after_match(text: np.ndarray, longest: int, count: int) -> np.ndarray:
    """At most `count` tokens after the last earlier place of the longest suffix."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        (places,) = np.nonzero((windows == text[-size:]).all(axis=1))
        if len(places):
            first = places[-1] + size
            return text[first : first + count]
    return text[:0]
