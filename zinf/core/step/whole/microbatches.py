"""The passes of one segment over all microbatches, inside an offloaded step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.segment.passes import BodyPasses
from zinf.core.step.sums import sum_dtype


def outputs_of(
    passes: BodyPasses,
    params: Sequence[Any],
    hoisted: Sequence[Any],
    inputs: Sequence[Any],
    num_microbatches: int,
) -> list[Any]:
    """The outputs of a forward pass, (num_microbatches, ...) each.

    Args:
        inputs: (num_microbatches, ...) each.
    """

    def one(microbatch: Sequence[Any]) -> list[Any]:
        return passes.call([*params, *microbatch, *hoisted])

    if num_microbatches == 1:
        return [y[None] for y in one([x[0] for x in inputs])]
    if not inputs:
        return [jnp.broadcast_to(y, (num_microbatches, *y.shape)) for y in one([])]
    return jax.lax.map(one, list(inputs))


def cotangents_of(
    passes: BodyPasses,
    params: Sequence[Any],
    hoisted: Sequence[Any],
    inputs: Sequence[Any],
    cotangents: Sequence[Any],
    num_microbatches: int,
) -> tuple[list[Any], list[Any]]:
    """`(gradients, cotangents of active inputs)` of a segment that is not last."""

    def one(microbatch: Sequence[Any], given: Sequence[Any]) -> Any:
        arguments = [*microbatch, *hoisted]
        return (), *passes.sort(passes.vjp([*params, *arguments], given))

    _, gradients, found = summed(one, inputs, cotangents, num_microbatches)
    return gradients, found


def summed(
    one: Callable, inputs: Any, cotangents: Any, num_microbatches: int
) -> tuple[Any, list[Any], Any]:
    """Run `one(inputs, cotangents)` on each microbatch.

    Returns:
        outputs and input cotangents, stacked, and the sums of the gradients between.
    """
    first = jax.tree.map(_first, (inputs, cotangents))
    if num_microbatches == 1:
        outputs, gradients, found = one(*first)
        outputs, found = jax.tree.map(lambda x: x[None], (list(outputs), found))
        return outputs, list(gradients), found

    def add(total: Any, microbatch: Any) -> tuple[Any, Any]:
        outputs, gradients, found = one(*microbatch)
        pairs = zip(total, gradients, strict=True)
        return [t + g.astype(t.dtype) for t, g in pairs], (outputs, found)

    _, gradients, _ = jax.eval_shape(one, *first)
    zeros = [jnp.zeros(g.shape, sum_dtype(g.dtype)) for g in gradients]
    microbatches = inputs, cotangents
    total, (outputs, found) = jax.lax.scan(
        add, zeros, microbatches, length=num_microbatches
    )
    return outputs, total, found


def _first(array: Any) -> Any:
    return array[0]
