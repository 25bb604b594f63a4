"""Typed random keys as the words they consist of, which every tier can hold."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(value: Any) -> bool:
    """True of an array, a tracer or a spec whose dtype is that of random keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def to_words(value: Any) -> Any:
    """A key array as 32-bit words, with a dim more; anything else as it is."""
    return jax.random.key_data(value) if is_key(value) else value


def from_words(words: Any, kind: Any) -> Any:
    """The reverse, where `kind` has the dtype that the value had."""
    if not is_key(kind):
        return words
    return jax.random.wrap_key_data(jnp.asarray(words), impl=_in_words(kind)[0])


def in_words(kind: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `to_words` of something with those of `kind`."""
    if is_key(kind):
        return _in_words(kind)[1]
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def _in_words(kind: Any) -> tuple[Any, jax.ShapeDtypeStruct]:
    """`(implementation, words)`; only of a value does jax tell the implementation."""
    implementations = []

    def words(key: jax.Array) -> jax.Array:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    spec = jax.eval_shape(words, jax.ShapeDtypeStruct(kind.shape, kind.dtype))
    return implementations[0], spec
