"""Guesses of next tokens, all of which one pass of the model checks.

A guess is kept if it is the token that would have been drawn at its place, with the key
and number of that place. So the text is the one without drafts, and only the number of
passes differs (Leviathan et al., arXiv:2211.17192, accept with the same probability).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Guess = Callable[[Sequence[int], Sequence[np.ndarray]], Sequence[Any]]
GuessOnDevice = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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
        on_device: `(texts (B, L), starts (B,), ends (B,)) -> guesses (B, num_tokens)`,
            the same as a function that jax traces: the text of row b is `texts[b,
            starts[b] : ends[b]]`. Fused generation then guesses without asking the
            host. Equal programs are kept for equal functions. None: `guess` is called
            between passes.
    """

    num_tokens: int
    guess: Guess
    on_device: GuessOnDevice | None = None

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
    lookup = _Lookup(num_tokens, max_matching_ngram_size)
    return Drafts(num_tokens, lookup.guess, lookup)


@dataclass(frozen=True)
class _Lookup:
    """Guesses at most `num_tokens` tokens after the last earlier place of a suffix.

    Attributes:
        longest: the most tokens of the suffix; a longer one that matches is preferred.
    """

    num_tokens: int
    longest: int

    def guess(
        self, numbers: Sequence[int], texts: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        del numbers
        return [self._after_match(text) for text in texts]

    def _after_match(self, text: np.ndarray) -> np.ndarray:
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
            (places,) = np.nonzero((windows == text[-size:]).all(axis=1))
            if len(places):
                first = places[-1] + size
                return text[first : first + self.num_tokens]
        return text[:0]

    def __call__(
        self, texts_BL: jax.Array, starts_B: jax.Array, ends_B: jax.Array
    ) -> jax.Array:
        """See `Drafts.on_device`."""
        return jax.vmap(self._after_match_on_device)(texts_BL, starts_B, ends_B)

    def _after_match_on_device(
        self, text_L: jax.Array, start: jax.Array, end: jax.Array
    ) -> jax.Array:
        place_L = jnp.arange(len(text_L))
        first, is_same_L = end, jnp.ones(len(text_L), bool)
        # `is_same_L[i]`: the `size` tokens up to place i are the last ones of the text.
        for size in range(1, self.longest + 1):
            shift = size - 1
            is_same_L &= jnp.roll(text_L, shift) == text_L[end - size]
            is_inside_L = (place_L >= start + shift) & (place_L < end - 1)
            last = jnp.max(place_L, initial=-1, where=is_same_L & is_inside_L)
            first = jnp.where(last >= 0, last + 1, first)
        places = first + jnp.arange(self.num_tokens)
        # As `Drafts.guesses`: the last token stands where there is no guess.
        return text_L[jnp.minimum(places, end - 1)]
