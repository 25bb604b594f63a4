"""The rows of a microbatch: their sizes, and which dims of arrays they lie along."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

NO_AXIS = -1
# A pass reads about so many tokens of prompts, if it has no time for more.
BLOCK_TOKENS = 256
LEAST_TOKENS = 16  # Tokens of the shortest prompt, and of the shortest part of one.


@dataclass(frozen=True)
class Shape:
    """Sizes of one microbatch: sequences, tokens of a prompt, slots of the cache."""

    rows: int
    prompt: int
    length: int

    @property
    def starts(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the first slots of the sequences."""
        return jax.ShapeDtypeStruct((self.rows,), np.int32)


@dataclass(frozen=True)
class Parts:
    """What one pass reads of prompts: parts of so many of them, of so many tokens.

    Attributes:
        rows: prompts of a microbatch.
        length: tokens of a part; the padded prompt is a multiple of it.
    """

    rows: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.length

    def smaller(self, *, all_rows: bool, whole: bool) -> "Parts | None":
        """Half of it; None if it is the least. For `all_rows`, `whole` see `parts`."""
        if self.rows > 1 and not all_rows:
            return replace(self, rows=self.rows // 2)
        if self.length > LEAST_TOKENS and not whole:
            return replace(self, length=self.length // 2)
        return None


def parts(
    shape: Shape,
    num_tokens: int = BLOCK_TOKENS,
    *,
    all_rows: bool = False,
    whole: bool = True,
) -> Parts:
    """What a pass reads of the prompts of a microbatch, of about so many tokens.

    It does not depend on the number of prompts, so that number changes no token.

    Args:
        all_rows: always parts of all rows.
        whole: parts are whole prompts.
    """
    length, least_rows = shape.prompt, shape.rows if all_rows else 1
    while not whole and length > LEAST_TOKENS and least_rows * length > num_tokens:
        length //= 2
    return Parts(max(least_rows, min(shape.rows, num_tokens // length)), length)


def row_axes(specs: Any, of_one_more: Any) -> Any:
    """For each array, the dim along which its sequences lie.

    `NO_AXIS` for arrays that are the same for all sequences.

    Args:
        specs: shapes for some number of sequences.
        of_one_more: shapes for one more.
    """

    def axis(spec: Any, larger: Any) -> int:
        pairs = zip(spec.shape, larger.shape, strict=True)
        differ = [i for i, (a, b) in enumerate(pairs) if a != b]
        return differ[0] if differ else NO_AXIS

    return jax.tree.map(axis, specs, of_one_more)


def along(flags: jax.Array, axis: int, ndim: int) -> jax.Array:
    """A flag of each sequence, (B,), reshaped to broadcast along `axis` of an array."""
    shape = [1] * ndim
    shape[axis] = -1
    return flags.reshape(shape)
