"""Prompts, and the sizes and leaves of the batches that are made of completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from zinf.core.config.completions import Completions


@dataclass(frozen=True)
class Prompt:
    """A prompt of the data.

    Attributes:
        tokens: int32 (T,).
        shown: what reward functions get: a text, or a conversation as messages.
        columns: the other fields of its record, for reward functions.
        where: the place of the record, for messages.
        beside: what the model reads beside the tokens; see `AbstractBeside`.
    """

    tokens: np.ndarray
    shown: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    where: str = "a prompt"
    beside: Any = None


@dataclass(frozen=True)
class Sizes:
    """How many completions there are at once, of which steps are made.

    Attributes:
        batch: completions of a step.
        drawn: completions that are drawn at once.
        group: completions of a prompt.
    """

    batch: int
    drawn: int
    group: int

    @property
    def num_prompts(self) -> int:
        return self.drawn // self.group

    @property
    def num_steps(self) -> int:
        """Steps that use each drawn completion once."""
        return self.drawn // self.batch


def check_room(prompt: Prompt, settings: Completions, length: int) -> None:
    """Refuse a prompt that has no room for a completion.

    Raises:
        ValueError: see above.
    """
    count, longest = len(prompt.tokens), settings.max_new_tokens
    if count + longest > length:
        raise ValueError(
            f"{prompt.where}: the prompt has {count:,} tokens, and with "
            f"{settings.KEY}.{settings.LENGTH} = {longest:,} they are more than the "
            f"{length:,} of a row (data.sequence_length, or what the model was made "
            f"for). Shorten the prompt, lower {settings.LENGTH}, or raise "
            "data.sequence_length."
        )


def batch_spec(
    names: Sequence[str], rows: int, length: int, tokens_name: str = "input_ids"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a batch; see `AbstractRollouts.names`."""
    tokens = jax.ShapeDtypeStruct((rows, length), np.int32)
    found = dict.fromkeys(names, jax.ShapeDtypeStruct((rows, length - 1), np.float32))
    found["denominators"] = jax.ShapeDtypeStruct((rows,), np.float32)
    own = {tokens_name: tokens}
    if tokens_name == "input_ids":
        own["labels"] = tokens
    return own | found
