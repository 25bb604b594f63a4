"""Log-likelihoods of tokens, by passes over prompts and what follows them.

A pass over all tokens but the last one predicts each next one. Requests whose tokens
are the same up to the last one, such as a prompt with "yes" and with "no", share a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.problem.cross_entropy import cross_entropy
from zinf.hf.model import Model, Params
from zinf.hf.prefill import AbstractRowBeside, Prefill, Row


@dataclass(frozen=True)
class Request:
    """Tokens, of which the last ones are scored.

    Attributes:
        tokens: at least two.
        num_scored: fewer than there are tokens: nothing predicts the first one.
        beside: what is read beside the tokens, such as images.
    """

    tokens: tuple[int, ...]
    num_scored: int
    beside: AbstractRowBeside | None = None


@dataclass(frozen=True)
class Score:
    """The log-likelihood of the scored tokens of a request.

    Attributes:
        log_likelihood: the sum of their log-probabilities, in nats.
        is_likeliest: whether each of them is the likeliest where it stands.
    """

    log_likelihood: float
    is_likeliest: bool


@dataclass(frozen=True)
class TokenScores:
    """The function that `Prefill` runs for `scored`."""

    model: Model

    def __call__(self, params: Params, batch: Mapping[str, jax.Array]) -> Any:
        """Log-probabilities of labels, given the tokens up to their own position.

        Args:
            batch: `input_ids` and `labels`, int32 (B, T); `last` (B,), the position of
                the last token, and `candidates` (B, K), what may follow it; maybe the
                leaves of images.

        Returns:
            for labels, `log_probabilities` float32 (B, T) and `are_likeliest`; for what
            follows the last token, `of_candidates` float32 (B, K) and `likeliest` (B,).
        """
        names = ("input_ids", *self.model.image_leaves)
        read = {name: batch[name] for name in names if name in batch}
        logits = self.model.logits(params, read).astype(jnp.float32)
        last = batch["last"][:, None, None]
        following = jnp.take_along_axis(logits, last, axis=1)[:, 0]
        of_all = jax.nn.log_softmax(following, axis=-1)
        return {
            "log_probabilities": -cross_entropy(logits, batch["labels"]),
            "are_likeliest": logits.argmax(axis=-1) == batch["labels"],
            "of_candidates": jnp.take_along_axis(of_all, batch["candidates"], axis=1),
            "likeliest": following.argmax(axis=-1).astype(jnp.int32),
        }


def scored(prefill: Prefill, requests: Sequence[Request]) -> list[Score]:
    """The score of each request.

    Args:
        prefill: of `TokenScores`.
    """
    # The requests of each row, by what all of them begin with, and then by last token.
    shared: dict[tuple[Any, ...], dict[int, list[int]]] = {}
    for number, request in enumerate(requests):
        candidates = shared.setdefault((request.tokens[:-1], request.beside), {})
        candidates.setdefault(request.tokens[-1], []).append(number)
    rows = [_row(tokens, beside, list(of)) for (tokens, beside), of in shared.items()]
    scores = [Score(0.0, False)] * len(requests)
    for candidates, found in zip(shared.values(), prefill.run(rows), strict=True):
        for place, (token, numbers) in enumerate(candidates.items()):
            for number in numbers:
                inner = _inner(requests[number])
                before = found["log_probabilities"][inner].sum(dtype=np.float64)
                scores[number] = Score(
                    float(before + np.float64(found["of_candidates"][place])),
                    bool(found["are_likeliest"][inner].all())
                    and int(found["likeliest"]) == token,
                )
    return scores


def _inner(request: Request) -> slice:
    """The positions of the labels of all scored tokens but the last one."""
    end = len(request.tokens) - 2
    return slice(end + 1 - request.num_scored, end)


def _row(
    tokens: Sequence[int],
    beside: AbstractRowBeside | None,
    candidates: Sequence[int],
) -> Row:
    # Few numbers of candidates, as each is a shape to compile for.
    width = 1 << (len(candidates) - 1).bit_length()
    filled = [*candidates, *[candidates[0]] * (width - len(candidates))]
    more = {
        "last": np.asarray(len(tokens) - 1, np.int32),
        "candidates": np.asarray(filled, np.int32),
    }
    return Row({"input_ids": tokens, "labels": [*tokens[1:], 0]}, more, beside)
