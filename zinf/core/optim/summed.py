"""Adds the gradients of several passes, of which one update is made later."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zinf.core.optim.separate import Separated, separate


class _Summed(NamedTuple):
    num_summed: jax.Array  # passes whose gradients the sums have, int32


def _init(params: Any) -> _Summed:
    del params
    return _Summed(jnp.zeros((), jnp.int32))


def _update(updates: Any, state: Any, params: Any = None) -> tuple[Any, _Summed]:
    is_empty = state.num_summed == 0
    # What a sum had before the first pass may be anything.
    new = jax.tree.map(lambda g, x: jnp.where(is_empty, g, x + g), updates, params)
    return new, _Summed(state.num_summed + 1)


def separated_sums(sums: Any, trainable: Collection[str]) -> Separated:
    """Additions to sums of gradients, as the updates of a transform.

    Its shared state is the number of passes that the sums have; at 0 a gradient takes
    the place of what is there.

    Args:
        sums: the parameter tree, abstract, with the dtypes of the sums.
        trainable: see `separate`.
    """
    tx = optax.GradientTransformation(_init, _update)
    return replace(separate(tx, sums, trainable=trainable), replaces=True)
