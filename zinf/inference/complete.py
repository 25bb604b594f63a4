"""Completes prompts of any lengths: groups them, plans each shape, runs the groups."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from xxhash import xxh3_128

from zinf.core.jaxpr.keys import is_key, to_words
from zinf.core.memory import Stores
from zinf.core.step.run.runner import AbstractRunner
from zinf.distributed import AbstractGroup
from zinf.inference.choose import make_generation
from zinf.inference.drafts import Drafts
from zinf.inference.generation import AbstractGeneration, Job, Kept
from zinf.inference.plan import GenerationPlanner
from zinf.inference.prompts import Request, as_tokens, by_part, check_lengths
from zinf.inference.scores import Scores, Written
from zinf.inference.texts import OnToken

ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `engine.generate` was asked for, beside the prompts and how to sample.

    Attributes:
        rows: sequences of a microbatch, which run as one array. With fewer prompts the
            other rows are filled. The tokens of a sequence depend on `rows` within
            rounding, and not on the number of prompts. There are more of them if
            devices could not divide them evenly.
        batch_size: the most sequences that are streamed together; None: as many as
            the budgets allow.
        drafts: guesses of next tokens; None for none.
    """

    max_new_tokens: int
    rows: int = ROWS
    batch_size: int | None = None
    on_token: OnToken | None = None
    scores: Scores | None = None
    drafts: Drafts | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "batch_size"):
            found = getattr(self, name)
            if found is not None and found < 1:
                raise ValueError(f"{name} must be at least 1; found {found}.")


def complete(
    prompts: Sequence[Any],
    asked: Asked,
    planner: GenerationPlanner,
    keys: jax.Array | None,
    stores: Stores,
    current: AbstractRunner,
    kept: Kept,
) -> list[Written]:
    """The new tokens of each prompt, with their scores if asked for.

    Args:
        keys: a random key a prompt; or one, of which each prompt gets its own.
        current: the runner that the arrays at rest belong to.
        kept: keeps the programs of each shape, and their plans for each number of
            microbatches.

    Raises:
        ValueError: a prompt is empty, is no tokens, or is too long.
        InfeasibleError: the programs or the cache do not fit.
        NonFiniteError: logits are not finite.
    """
    tokens = as_tokens(prompts)
    check_lengths(tokens, asked.max_new_tokens, planner.steps.decoder.max_length)
    words = _words(keys, planner.steps.key, len(tokens))
    group = planner.planner.group
    how = asked.max_new_tokens, asked.rows, asked.batch_size
    _agree(group, "the prompts of engine.generate", *tokens, *words, how)
    requests = [
        Request(number, one, own)
        for number, (one, own) in enumerate(zip(tokens, words, strict=True))
    ]
    found = {request.number: Written() for request in requests}
    while requests:
        written, open_numbers = _written(
            requests, asked, planner, stores, current, kept
        )
        for number, new in written.items():
            found[number].extend(new)
        requests = [
            _continued(request, written[request.number].tokens)
            for request in requests
            if request.number in open_numbers
            and len(found[request.number].tokens) < asked.max_new_tokens
        ]
    texts = [found[number] for number in range(len(tokens))]
    # They may differ if `on_token` ends a text on some of the processes.
    _agree(group, "the texts of engine.generate", *[text.tokens for text in texts])
    return texts


def _agree(group: AbstractGroup, name: str, *values: Any) -> None:
    """End all processes, with an error, unless all have the same numbers.

    Else one would wait for others in vain.
    """
    if group.count > 1:
        listed = json.dumps([np.asarray(x).tolist() for x in values])
        group.agree({name: xxh3_128(listed.encode()).hexdigest()})


def _written(
    requests: Sequence[Request],
    asked: Asked,
    planner: GenerationPlanner,
    stores: Stores,
    current: AbstractRunner,
    kept: Kept,
) -> tuple[dict[int, Written], set[int]]:
    """The new tokens of requests, and the numbers of requests that have not ended."""
    found: dict[int, Written] = {}
    open_numbers: set[int] = set()
    switches_at = planner.steps.decoder.switches_at
    num_new, num_guesses = asked.max_new_tokens, planner.steps.num_guesses
    rows = planner.whole_rows(asked.rows)
    groups = by_part(requests, rows, num_new, switches_at, num_guesses)
    for part, group in groups.items():
        make = partial(make_generation, planner, part.shape)
        made: AbstractGeneration = kept(part.shape, make)
        how = part, asked.on_token, asked.drafts, asked.batch_size
        job = Job(planner.steps.sampling, *how, stores, current)
        texts = made.write(group, job, kept)
        found |= texts.made
        open_numbers |= texts.open
    return found, open_numbers


def _continued(request: Request, new: Sequence[int]) -> Request:
    """The request for what follows the tokens that were just written."""
    tokens = np.concatenate([request.tokens, np.asarray(new, np.int32)])
    return replace(request, tokens=tokens, num_written=request.num_written + len(new))


def _words(keys: jax.Array | None, kind: jax.Array, count: int) -> Sequence[np.ndarray]:
    """One random key for each prompt, as 32-bit words.

    Raises:
        ValueError: there are fewer or more keys than prompts.
    """
    if keys is None:
        keys = kind
    if not isinstance(keys, jax.Array) or not is_key(keys):
        raise ValueError(
            "key must be a random key, such as jax.random.key(0), or one a prompt; "
            f"found {type(keys).__name__}."
        )
    if keys.ndim == 0:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, np.arange(count))
    if keys.shape != (count,):
        raise ValueError(
            f"key has the shape {list(keys.shape)}, and there are {count} prompts. "
            "Give one key, or as many as prompts."
        )
    return list(np.asarray(to_words(keys)))
