"""Adam whose moments take 2 or 1 byte an entry instead of 4.

`scale_by_adam_bfloat16` rounds each moment to bfloat16 up or down at random, so that
the mean of the rounded value is the value. Rounding to the nearest would keep the
second moment as it is: with b2 = 0.999 it changes by less than half a unit.

`scale_by_adam_8bit` keeps blocks of 256 entries as codes of 8 bits and a scale, as
https://arxiv.org/abs/2110.02861 does. A leaf is updated whole, so no block is cut.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

BLOCK = 256
# Smaller leaves keep float32 moments, as in bitsandbytes.
MIN_NUMEL_8BIT = 4096
EXPONENT_BITS = 7
Trees = tuple[Any, Any]


class AdamState(NamedTuple):
    """Moments of gradients; `count` is the number of updates."""

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates


class QuantizedMoment(NamedTuple):
    """An array as codes of 8 bits, [blocks, 256], and the scale of each block."""

    codes: Any
    scales: Any


def scale_by_adam_bfloat16(
    b1: float = 0.9, b2: float = 0.999, *, eps: float = 1e-8
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments in bfloat16, rounded stochastically.

    The random bits are a hash of the entry's own bits and the count: an update in
    blocks has the bits of the whole. Entries that are equal are rounded alike.
    """

    def init(params: optax.Params) -> AdamState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.bfloat16), params)
        return AdamState(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(
        updates: optax.Updates, state: Any, params: Any = None
    ) -> tuple[optax.Updates, AdamState]:
        del params
        count: Any = optax.safe_increment(state.count)
        widened = jax.tree.map(lambda x: x.astype(jnp.float32), (state.mu, state.nu))
        moments = _moments(updates, widened, b1, b2)
        rounded = [
            jax.tree.map(lambda x, salt=salt: _stochastic(x, count, salt), tree)
            for salt, tree in enumerate(moments)
        ]
        return _scaled(moments, count, b1, b2, eps), AdamState(count, *rounded)

    return optax.GradientTransformation(init, update)


def scale_by_adam_8bit(
    b1: float = 0.9, b2: float = 0.999, *, eps: float = 1e-8
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments in blocks of 8-bit codes.

    The first moment has a code book with signs, the second one without (section 2.2 of
    the paper). The update is made from the moments before they are rounded.
    """
    books = code_book(is_signed=True), code_book(is_signed=False)

    def init(params: optax.Params) -> AdamState:
        def first(book: np.ndarray) -> Any:
            return jax.tree.map(lambda p: _encoded(jnp.zeros_like(p), book), params)

        return AdamState(jnp.zeros([], jnp.int32), *map(first, books))

    def update(
        updates: optax.Updates, state: Any, params: Any = None
    ) -> tuple[optax.Updates, AdamState]:
        del params
        count: Any = optax.safe_increment(state.count)
        old = [
            jax.tree.map(lambda g, x, book=book: _decoded(x, g.shape, book), updates, s)
            for s, book in zip((state.mu, state.nu), books, strict=True)
        ]
        moments = _moments(updates, (old[0], old[1]), b1, b2)
        kept = [
            jax.tree.map(lambda x, book=book: _encoded(x, book), tree)
            for tree, book in zip(moments, books, strict=True)
        ]
        return _scaled(moments, count, b1, b2, eps), AdamState(count, *kept)

    return optax.GradientTransformation(init, update)


@cache
def code_book(*, is_signed: bool) -> np.ndarray:
    """The 256 values of dynamic tree quantization, rising, in [-1, 1] or [0, 1].

    The number of leading zero bits is a power of ten; the bits behind divide [0.1, 1]
    evenly (figure 2 of the paper). Made as bitsandbytes makes it.
    """
    values = [0.0, 1.0]
    for i in range(EXPONENT_BITS):
        count = 2 ** (i if is_signed else i + 1)
        borders = np.linspace(0.1, 1, count + 1)
        means = (borders[:-1] + borders[1:]) / 2
        exact = 10.0 ** (i - EXPONENT_BITS + 1) * means
        values += [*exact, *(-exact if is_signed else ())]
    values += [0.0] * (256 - len(values))
    return np.sort(np.array(values, np.float32))


def _moments(gradients: Any, old: Trees, b1: float, b2: float) -> Trees:
    def mix(old: Any, new: Any, rate: float) -> Any:
        return rate * old + (1 - rate) * new

    first = jax.tree.map(lambda g, m: mix(m, g, b1), gradients, old[0])
    return first, jax.tree.map(lambda g, v: mix(v, g * g, b2), gradients, old[1])


def _scaled(moments: Trees, count: Any, b1: float, b2: float, eps: float) -> Any:
    steps = count.astype(jnp.float32)
    first, second = 1 - b1**steps, 1 - b2**steps
    return jax.tree.map(
        lambda m, v: (m / first) / (jnp.sqrt(v / second) + eps), *moments
    )


def _stochastic(x: jax.Array, count: jax.Array, salt: int) -> jax.Array:
    """Rounded to bfloat16, away from zero with the probability of the cut-off bits."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # The finaliser of MurmurHash3, of the entry and the step.
    word = bits ^ (count.astype(jnp.uint32) * np.uint32(0x9E3779B9) + np.uint32(salt))
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    word = word ^ (word >> np.uint32(16))
    added = bits + (word & np.uint32(0xFFFF))
    cut = lax.bitcast_convert_type(added & np.uint32(0xFFFF0000), jnp.float32)
    # Infinities and NaNs would change into each other.
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def _encoded(x: jax.Array, book: np.ndarray) -> Any:
    if x.size < MIN_NUMEL_8BIT:
        return x.astype(jnp.float32)
    flat = x.astype(jnp.float32).reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1)
    safe = jnp.where(scales > 0, scales, jnp.ones_like(scales))
    borders = jnp.asarray((book[1:] + book[:-1]) / 2)
    codes = jnp.searchsorted(borders, blocks / safe[:, None], side="left")
    return QuantizedMoment(codes.astype(jnp.uint8), scales)


def _decoded(stored: Any, shape: tuple[int, ...], book: np.ndarray) -> jax.Array:
    if not isinstance(stored, QuantizedMoment):
        return stored
    values = jnp.asarray(book)[stored.codes.astype(jnp.int32)] * stored.scales[:, None]
    numel = int(np.prod(shape))
    return values.reshape(-1)[:numel].reshape(shape)
