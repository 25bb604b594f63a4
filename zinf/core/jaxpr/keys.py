"""Converts typed random keys to plain words, which every tier can hold, and back."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(value: Any) -> bool:
    """Whether an array, a tracer or a spec has the dtype of typed random keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def to_words(value: Any) -> Any:
    """A key array as 32-bit words, in one more dim; other values unchanged."""
    return jax.random.key_data(value) if is_key(value) else value


def from_words(words: Any, kind: Any) -> Any:
    """The inverse of `to_words`; `kind` has the dtype of the original value."""
    if not is_key(kind):
        return words
    return jax.random.wrap_key_data(jnp.asarray(words), impl=_in_words(kind)[0])


def in_words(kind: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `to_words` of a value with the shape and dtype of `kind`."""
    if is_key(kind):
        return _in_words(kind)[1]
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def _in_words(kind: Any) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The key implementation of `kind`, and the shape and dtype of its words.

    jax gives the implementation only of a value, so this traces one.
    """
    implementations = []

    def words(key: jax.Array) -> jax.Array:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    spec = jax.eval_shape(words, jax.ShapeDtypeStruct(kind.shape, kind.dtype))
    return implementations[0], spec
