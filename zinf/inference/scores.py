"""Scores of the tokens that were drawn: log-probabilities and entropies.

All are of the logits divided by the temperature, before a repetition penalty and before
tokens are left out: what `engine.log_probabilities(batch, temperature=...)` gives for
the same text. So their difference is the rounding of two programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Scores:
    """Asks `engine.generate` for `Scored` texts.

    Attributes:
        num_top: how many of the likeliest tokens are returned for each new token.
    """

    num_top: int = 0

    def __post_init__(self) -> None:
        if self.num_top < 0:
            raise ValueError(f"num_top must be at least 0; found {self.num_top}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays that `of` returns."""
        top = ("top_log_probabilities", "top_tokens") if self.num_top else ()
        return "log_probabilities", "entropies", *top

    def of(
        self, logits: jax.Array, token: jax.Array, temperature: jax.Array
    ) -> dict[str, jax.Array]:
        """The fields of `Scored` for one new token of each sequence.

        Args:
            logits: float32 (B, V).
            token: the drawn ones, int32 (B,).
            temperature: 0 (greedy) counts as 1.
        """
        tempered = logits / jnp.where(temperature == 0, 1, temperature)
        all_log = jax.nn.log_softmax(tempered, axis=-1)
        found = {
            "log_probabilities": jnp.take_along_axis(all_log, token[:, None], -1)[:, 0],
            "entropies": jnp.sum(jax.scipy.special.entr(jnp.exp(all_log)), axis=-1),
        }
        if self.num_top:
            count = min(self.num_top, logits.shape[1])
            top, tokens = jax.lax.top_k(all_log, count)
            found |= {"top_log_probabilities": top, "top_tokens": tokens}
        return found


@dataclass(frozen=True)
class Scored:
    """A text of T new tokens, and what the model thought of each. In nats.

    Attributes:
        tokens: as `engine.generate` gives them without scores.
        log_probabilities: float32 (T,), of the tokens.
        entropies: float32 (T,), of the distributions that they were drawn from.
        top_tokens: int32 (T, K), the likeliest tokens, the likeliest first.
        top_log_probabilities: float32 (T, K).
    """

    tokens: list[int]
    log_probabilities: np.ndarray
    entropies: np.ndarray
    top_tokens: np.ndarray
    top_log_probabilities: np.ndarray


@dataclass
class Written:
    """The new tokens of a text, and their scores by name."""

    tokens: list[int] = field(default_factory=list)
    scores: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, token: int, scores: Mapping[str, np.ndarray]) -> None:
        self.tokens.append(token)
        for name, value in scores.items():
            self.scores.setdefault(name, []).append(value)

    def extend(self, other: "Written") -> None:
        self.tokens += other.tokens
        for name, values in other.scores.items():
            self.scores.setdefault(name, []).extend(values)

    def scored(self) -> Scored:
        def stacked(name: str, empty: Sequence[int], dtype: type) -> np.ndarray:
            values = self.scores.get(name)
            return np.stack(values) if values else np.zeros(empty, dtype)

        none = len(self.tokens), 0
        return Scored(
            self.tokens,
            stacked("log_probabilities", none[:1], np.float32),
            stacked("entropies", none[:1], np.float32),
            stacked("top_tokens", none, np.int32),
            stacked("top_log_probabilities", none, np.float32),
        )
