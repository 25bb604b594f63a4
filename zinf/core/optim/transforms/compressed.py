"""Transforms whose momenta, gradients or steps devices send by their signs.

Each closes over what it sends (`zinf.core.sharding.signs`), where `compression_of`
finds it. On one device, and in steps that send gradients as they are, it is an
ordinary transform.

[Note: zero variance] One bit cannot say zero. A number whose gradient was always zero,
such as the row of a token that never came, has a second moment of zero and would get
the scale of its leaf over eps as its update. It gets none. (DeepSpeed has users give an
`exp_avg_mask`, and diverges without.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zinf.core.optim.rate import functions_of
from zinf.core.sharding.local_steps import LocalSteps
from zinf.core.sharding.signs import AbstractCompression, Momenta

ADAM = "scale_by_adam.<locals>.update_fn"


class FrozenLambState(NamedTuple):
    """Two moments, and what follows the trust ratio once the second moment stays.

    Attributes:
        fresh: the second moment as it would have gone on.
        coefficient: of each leaf, an average of its trust ratios in the warm-up.
        factor: of each leaf, by which that is scaled afterwards.
    """

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    fresh: optax.Updates
    coefficient: optax.Updates
    factor: optax.Updates


def compression_of(tx: optax.GradientTransformation) -> AbstractCompression | None:
    """What a transform sends by its signs; None: it sends gradients as they are.

    Raises:
        ValueError: several transforms of a chain send something.
    """
    found = {
        value
        for _, cells in functions_of(tx)
        for value in cells.values()
        if isinstance(value, AbstractCompression)
    }
    if len(found) > 1:
        names = " and ".join(sorted(one.name for one in found))
        raise ValueError(
            f"{names} are in one optimizer, and a step sends one thing. Keep one."
        )
    return next(iter(found), None)


def compressed(
    tx: optax.GradientTransformation, *, freeze_step: int
) -> optax.GradientTransformation:
    """Make devices average momenta by one bit a number, after a warm-up of `tx`.

    `zinf.compressed(optax.adamw(1e-3), freeze_step=2000)` is 1-bit Adam
    (https://arxiv.org/abs/2102.02888) with Adam's bias correction. The first
    `freeze_step` updates are those of `tx`, with gradients averaged as they are. After
    them the second moment stays, and so do both bias corrections. Each device updates
    the momentum with its own gradient, and all get the mean of the signs, each times
    the root mean square of its leaf: 1/32 of the bytes of a float32 all-reduce. What
    signs lose is added to what is sent next. On one device nothing is sent, and the
    second moment stays.

    An array of n numbers keeps two errors besides the state of `tx`, in float32 and
    saved with it: (1, devices, N) of what each device sent, and (1, devices, N /
    devices) of the means, where N is n rounded up to whole bytes of signs for each
    device. Arrays of one dim, or of fewer than 128 numbers, go as they are.

    Engines run it as one program with all arrays on the devices, at stages 0 and 1 of
    ZeRO; at stage 1 every device has the whole momentum. They refuse clipping, fp16,
    `skip_nonfinite`, offloading and a mesh whose devices divide more than examples.

    Args:
        tx: a transform with one `optax.scale_by_adam`, first in its chain (`adam`,
            `adamw`, `lamb`): it must see the gradients. Without Nesterov momentum.
        freeze_step: the number of updates of the warm-up, at least 1. The second moment
            has to be settled by then, which takes about 1 / (1 - b2) updates.

    Raises:
        ValueError: `tx` is another one, or `freeze_step` is below 1.
    """
    if freeze_step < 1:
        raise ValueError(f"freeze_step is {freeze_step}; it has to be at least 1.")
    b1, b2 = _decays(tx)
    compression = Momenta("zinf.compressed", b1, freeze_step)
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        (adam,) = _adam_states(state)
        is_frozen = jnp.asarray(adam.count) >= compression.freeze_step
        # With a zero gradient `tx` only decays the two moments, so they are given to
        # it larger by that. It counts no update, so bias corrections stay too.
        moved = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, adam.mu, updates)
        kept = jax.tree.map(_where_varied, moved, adam.nu)
        before = optax.ScaleByAdamState(
            jnp.where(is_frozen, compression.freeze_step - 1, adam.count),
            jax.tree.map(lambda x, m: jnp.where(is_frozen, x / b1, m), kept, adam.mu),
            jax.tree.map(lambda v: jnp.where(is_frozen, v / b2, v), adam.nu),
        )
        given = jax.tree.map(lambda g: jnp.where(is_frozen, 0, g), updates)
        new, after = inner.update(given, _with_adam(state, before), params, **extra)
        (found,) = _adam_states(after)
        still = jax.tree.map(
            lambda old, v: jnp.where(is_frozen, old, v), adam.nu, found.nu
        )
        return new, _with_adam(after, found._replace(nu=still))

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _decays(tx: optax.GradientTransformation) -> tuple[float, float]:
    """The decays of the moments of the only `optax.scale_by_adam` of a transform."""
    found = [c for f, c in functions_of(tx) if f.__qualname__ == ADAM]
    decays = [(cells["b1"], cells["b2"]) for cells in found]
    are_fixed = all(isinstance(b, float) and 0 < b < 1 for bs in decays for b in bs)
    one = jnp.ones(())
    _, state = tx.update(one, tx.init(one), one)
    states = _adam_states(state)
    # The first momentum shows whether the gradient came as it was.
    first: Any = states[0].mu if len(states) == 1 else 0
    sees = bool(decays) and bool(jnp.isclose(first, 1 - decays[0][0]))
    if len(found) != 1 or not are_fixed or found[0]["nesterov"] or not sees:
        raise ValueError(
            f"zinf.compressed found {len(found)} optax.scale_by_adam in the transform "
            "that take gradients as they are, with fixed decays above 0 and without "
            "Nesterov momentum. It needs one, such as optax.adam, adamw or lamb; leave "
            "clipping and L2 penalties away."
        )
    return decays[0]


def _adam_states(state: Any) -> list[optax.ScaleByAdamState]:
    nodes = jax.tree.leaves(state, is_leaf=_is_adam)
    return [node for node in nodes if _is_adam(node)]


def _with_adam(state: Any, new: optax.ScaleByAdamState) -> Any:
    return jax.tree.map(
        lambda node: new if _is_adam(node) else node, state, is_leaf=_is_adam
    )


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def scale_by_frozen_adam(
    compression: Momenta, b2: float, *, eps: float
) -> optax.GradientTransformation:
    """Adam without bias correction, whose second moment stays after the warm-up.

    It is what DeepSpeed's OneBitAdam does with a gradient.
    """

    def is_updated(count: jax.Array) -> jax.Array:
        return count < compression.freeze_step

    return _uncorrected_adam(compression.b1, b2, eps, is_updated)


def scale_by_zero_one_adam(
    compression: LocalSteps, b2: float, *, eps: float
) -> optax.GradientTransformation:
    """Adam without bias correction, whose second moment is updated in some steps.

    It is what DeepSpeed's ZeroOneAdam does with a gradient before `var_freeze_step`.
    """

    def is_updated(count: jax.Array) -> jax.Array:
        is_early = count < compression.var_freeze_step
        return is_early & compression.updates_variance(count)

    return _uncorrected_adam(compression.b1, b2, eps, is_updated)


def _uncorrected_adam(
    b1: float, b2: float, eps: float, is_updated: Callable[[jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Adam without bias correction.

    Args:
        is_updated: whether an update changes the second moment, by the number before.
    """

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        updates: optax.Updates, state: Any, params: Any = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        del params
        moves = is_updated(state.count)

        def second(v: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.where(moves, b2 * v + (1 - b2) * g * g, v)

        nu = jax.tree.map(second, state.nu, updates)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        mu = jax.tree.map(_where_varied, mu, nu)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        count = optax.safe_increment(state.count)
        return scaled, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_frozen_lamb(
    compression: Momenta,
    b2: float,
    *,
    eps: float,
    weight_decay: float,
    coefficients: tuple[float, float],
    coeff_beta: float,
    factors: tuple[float, float],
    factor_threshold: float,
) -> optax.GradientTransformation:
    """LAMB without bias correction, whose trust ratio is followed after the warm-up.

    It is what DeepSpeed's OneBitLamb does with a gradient. After the warm-up the second
    moment stays, and the ratio of a leaf is its average over the warm-up, times how
    much smaller a second moment would be that had gone on, at most.

    Args:
        coefficients: the smallest and the largest trust ratio of the warm-up.
        coeff_beta: the share of the average that each update keeps.
        factors: the smallest and the largest factor of that average.
        factor_threshold: the largest change of the factor in one update, as a share.
    """
    b1 = compression.b1

    def init(params: optax.Params) -> FrozenLambState:
        zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(3)]
        scalars = [
            jax.tree.map(lambda p, x=x: jnp.full((), x, p.dtype), params)
            for x in (0.0, 1.0)
        ]
        return FrozenLambState(jnp.zeros((), jnp.int32), *zeros, *scalars)

    def update(
        updates: optax.Updates, state: Any, params: Any = None
    ) -> tuple[optax.Updates, FrozenLambState]:
        is_frozen = state.count >= compression.freeze_step

        def leaf(
            g: jax.Array, p: jax.Array, m: jax.Array, v: jax.Array, *own: jax.Array
        ) -> tuple[jax.Array, ...]:
            fresh, coefficient, factor = own
            fresh = b2 * fresh + (1 - b2) * g * g
            v = jnp.where(is_frozen, v, fresh)
            m = _where_varied(b1 * m + (1 - b1) * g, v)
            root = jnp.sqrt(v) + eps
            step = m / root
            decayed = step + weight_decay * p
            sizes = (jnp.linalg.norm(x.ravel()) for x in (p, decayed, step))
            weight, size, size_undecayed = sizes
            has_ratio = (weight > 0) & (size > 0)
            ratio = jnp.clip(weight / jnp.where(has_ratio, size, 1), *coefficients)
            ratio = jnp.where(has_ratio, ratio, 1)
            average = coeff_beta * coefficient + (1 - coeff_beta) * ratio
            average = jnp.where(ratio != 1, average, coefficient)
            largest = jnp.max(root / (jnp.sqrt(fresh) + eps))
            if weight_decay:
                share = size_undecayed / jnp.where(size > 0, size, 1)
                share = jnp.minimum(share, 1)
                largest = largest * share + 1 - share
            limits = factor * (1 - factor_threshold), factor * (1 + factor_threshold)
            new_factor = jnp.clip(jnp.clip(largest, *factors), *limits)
            used = jnp.where(is_frozen, coefficient * new_factor, ratio)
            return (
                used * decayed,
                m,
                v,
                fresh,
                jnp.where(is_frozen, coefficient, average),
                jnp.where(is_frozen, new_factor, factor),
            )

        found = jax.tree.map(leaf, updates, params, *state[1:])
        new, *states = (
            jax.tree.map(lambda _, x, i=i: x[i], updates, found) for i in range(6)
        )
        count: Any = optax.safe_increment(state.count)
        return new, FrozenLambState(count, *states)

    return optax.GradientTransformation(init, update)


def _where_varied(moment: jax.Array, variance: jax.Array) -> jax.Array:
    """A momentum that is zero where the second moment is. See [Note: zero variance]."""
    return jnp.where(variance > 0, moment, 0)
