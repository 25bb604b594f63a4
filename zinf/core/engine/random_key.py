"""The random key of a run: the keys of each step, and the key as JSON."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zinf.core.engine.saved_scalars import damaged


def step_keys(
    rng: jax.Array | None, step: int, count: int, *, number_of_call: int = 0
) -> list[jax.Array]:
    """The keys of the `count` microbatches of step `step` (from 0).

    A key is `fold_in(rng, step)`; with several microbatches the number of the
    microbatch is folded in too. Without `rng` there are no keys.

    Args:
        number_of_call: of a batch among those of one update. Only the first has the
            keys of a step; the numbers of the others are folded in from the end, as
            microbatches are from 0.
    """
    if rng is None:
        return []
    key = jax.random.fold_in(rng, step)
    if number_of_call:
        key = jax.random.fold_in(key, 2**32 - number_of_call)
    return microbatch_keys(key, count)


def microbatch_keys(key: jax.Array, count: int) -> list[jax.Array]:
    """The key itself, or one for each of several microbatches."""
    return [key] if count == 1 else [jax.random.fold_in(key, m) for m in range(count)]


def key_to_json(rng: jax.Array | None) -> dict[str, Any] | None:
    """A random key, typed or raw, as a dict of its words and its implementation."""
    if rng is None:
        return None
    if not jax.numpy.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return {"implementation": None, "words": np.asarray(rng).tolist()}
    words = np.asarray(jax.random.key_data(rng)).tolist()
    return {"implementation": str(jax.random.key_impl(rng)), "words": words}


def key_from_json(
    saved: Mapping[str, Any] | None, current: jax.Array | None
) -> jax.Array | None:
    """The saved key, which replaces the current one.

    Raises:
        ValueError: only one of the two runs has a random key, or the saved key is
            damaged.
    """
    if (saved is None) != (current is None):
        has, lacks = "the saved run", "this one"
        if saved is None:
            has, lacks = lacks, has
        raise ValueError(
            f"{has} has a random key and {lacks} has none. Pass rng= to "
            "zinf.initialize exactly if the run that is resumed had it."
        )
    if saved is None:
        return None
    try:
        words = jax.numpy.asarray(np.asarray(saved["words"], np.uint32))
        if saved["implementation"] is not None:
            return jax.random.wrap_key_data(words, impl=saved["implementation"])
        # This raises if the words do not have the shape of a key of jax's default kind.
        jax.random.wrap_key_data(words)
    except (KeyError, TypeError, ValueError, OverflowError, NotImplementedError) as e:
        raise damaged(f"rng: {e}") from None
    return words
