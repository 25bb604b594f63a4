"""Averages of the weights, as transforms of optax."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AverageState(NamedTuple):
    """The average, shaped as the parameters; `num_updates` counts those done."""

    num_updates: jax.Array
    ema: optax.Params


def with_ema(decay: float, *, update_after: int = 0) -> optax.GradientTransformation:
    """Keep an exponential moving average of the weights beside them.

    It changes no update. Chain it last, since it adds the updates that it is given to
    the weights: `optax.chain(optax.adamw(1e-3), zinf.with_ema(0.999))`.
    (`optax.ema` averages updates, not weights.)

    The average begins as the initial weights. After update t (from 0) gave the weights
    w, it becomes `d * ema + (1 - d) * w`, where d is 0 for t < `update_after` and
    `decay` afterwards: until then the average is the weights themselves. So there is no
    bias to correct. This is `torch.optim.swa_utils.get_ema_avg_fn`; averaging goes back
    to Polyak and Juditsky (1992), https://doi.org/10.1137/0330046.

    The average is a state array of each trained leaf, in float32 or the wider dtype of
    its master. It rests where the optimizer's state rests, is updated there in blocks,
    and is in every checkpoint: 4 more bytes a parameter. Read it with
    `engine.get(path, "ema")`, compute with it with `engine.evaluate(batch,
    kind="ema")`, and export it with `kind="ema"` of `zinf.interchange` and `zinf.hf`.

    Args:
        decay: the share of the old average that each update keeps; at least 0 and
            below 1.
        update_after: number of updates after which averaging begins.

    Raises:
        ValueError: `decay` or `update_after` is out of range; or, in an update, no
            parameters were given.
    """
    if not 0 <= decay < 1:
        raise ValueError(
            f"decay is {decay:g}; it has to be at least 0 and below 1, such as 0.999."
        )
    if update_after < 0:
        raise ValueError(f"update_after is {update_after}; it cannot be negative.")

    def shares(num_updates: jax.Array) -> tuple[Any, Any]:
        old = jnp.where(num_updates < update_after, 0.0, decay)
        return old, 1 - old

    return _averaging(AverageState, shares, "zinf.with_ema")


class ReferenceState(NamedTuple):
    """A reference, shaped as the parameters; `num_updates` counts those done."""

    num_updates: jax.Array
    reference: optax.Params


REFERENCE = ReferenceState._fields[-1]
AVERAGES = (AverageState, ReferenceState)


def with_reference(alpha: float, *, every: int) -> optax.GradientTransformation:
    """Keep the weights as they were, moved towards the weights at times.

    After every `every` updates the reference becomes `(1 - alpha) * reference + alpha *
    w` of the new weights w, as `SyncRefModelCallback` of TRL has it. Else it is as
    `with_ema`, and read as its average is, by the kind "reference".
    """

    def shares(num_updates: jax.Array) -> tuple[Any, Any]:
        new = jnp.where((num_updates + 1) % every == 0, alpha, 0.0)
        return 1 - new, new

    return _averaging(ReferenceState, shares, "a reference")


def _averaging(
    kind: Callable[[jax.Array, Any], Any],
    shares: Callable[[jax.Array], tuple[Any, Any]],
    name: str,
) -> optax.GradientTransformation:
    """A transform that keeps averages of the weights and changes no update.

    Args:
        kind: one of `AVERAGES`.
        shares: from the updates done, the share of the average as it is, and that of
            the new weights.
    """

    def init(params: optax.Params) -> Any:
        average = jax.tree.map(lambda p: jnp.array(p, _wide(p)), params)
        return kind(jnp.zeros([], jnp.int32), average)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError(f"{name} needs the parameters: update(..., params).")
        num_updates, average = state
        old, new = shares(num_updates)

        def averaged(average: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
            weight = (p + u).astype(p.dtype).astype(average.dtype)
            return old * average + new * weight

        average = jax.tree.map(averaged, average, params, updates)
        count: Any = optax.safe_increment(num_updates)
        return updates, kind(count, average)

    return optax.GradientTransformation(init, update)


def _wide(param: jax.Array) -> Any:
    return jnp.promote_types(param.dtype, jnp.float32)
