"""Training in plain jax and optax: the reference of tests that `zinf.verify` cannot do.

`zinf.verify` gives every step the same batch. Here batches differ.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax


def trained_in_jax(
    loss: Callable,
    params: Any,
    tx: optax.GradientTransformation,
    steps: Sequence[Sequence[tuple[Any, ...]]],
) -> tuple[list[float], Any]:
    """Losses and parameters after the steps.

    Args:
        steps: of each step the arguments after the parameters, for each microbatch.
    """

    @jax.jit
    def step(params: Any, state: Any, microbatches: Any) -> Any:
        def mean(params: Any) -> jax.Array:
            losses = [loss(params, *arguments) for arguments in microbatches]
            return sum(losses[1:], losses[0]) / len(losses)

        value, grads = jax.value_and_grad(mean)(params)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state, losses = tx.init(params), []
    for microbatches in steps:
        value, params, state = step(params, state, microbatches)
        losses.append(float(value))
    return losses, params
