"""Sums of squares for norms, which do not overflow where the norm does not.

[Note: wide sums of squares] The square of a float32 number of 1.9e19 or more is inf,
although the number, and the norm, are far from it. So such numbers are also squared
after they are multiplied by 2**-96. One float32 scalar says both. If it is not
negative, it is the sum of the squares. If it is negative, that sum has overflowed, and
the scalar is minus the sum of the scaled squares. Ordinary sums have the bits of plain
ones.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# A power of two, so that scaling rounds nothing. The squares of the largest float32
# numbers become 1.9e19: 1e19 of them can be added.
SCALE = 2.0**-96
# Smaller numbers add nothing to a sum that overflows: 2**30 of their squares are less
# than 2**70, and the sum is at least 2**128.
LEAST = 2.0**20

Squares = tuple[Any, Any]
"""Sums of squares in float32: of the numbers, and of the scaled numbers."""


def squares(x: Any) -> Squares:
    """The sums of the squares of a traced array."""
    x = x.astype(jnp.float32)
    # XLA makes `x * x * (SCALE * SCALE)` of a plain product, which is inf times zero.
    # XLA does not do that through a `where`.
    scaled = jnp.where(jnp.abs(x) > LEAST, x * jnp.float32(SCALE), jnp.float32(0))
    return jnp.sum(jnp.square(x)), jnp.sum(jnp.square(scaled))


def combined(parts: Sequence[Squares]) -> Any:
    """Add all parts, scalars or arrays, to the one scalar that the note describes."""
    if not parts:
        return jnp.float32(0)
    plain, scaled = (
        jnp.sum(jnp.concatenate([jnp.ravel(x) for x in column]))
        for column in zip(*parts, strict=True)
    )
    return jnp.where(jnp.isinf(plain), -scaled, plain)


def root(square: Any, xp: Any) -> Any:
    """The norm whose square is encoded in a scalar as the note describes."""
    return xp.sqrt(xp.abs(square)) * xp.where(square < 0, 1 / SCALE, 1.0)


def added(parts: Iterable[float]) -> np.float64:
    """The sum of squares that are encoded as in the note, in float64, in order."""
    return np.float64(sum(x if not x < 0 else -x / SCALE**2 for x in parts))
