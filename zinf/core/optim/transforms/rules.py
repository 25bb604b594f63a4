"""Update rules of torch and DeepSpeed that optax lacks or defines differently.

All are separable per leaf.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# Quintic Newton-Schulz iteration of https://kellerjordan.github.io/posts/muon.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MATRIX_EPS = 1e-7


class AdagradState(NamedTuple):
    """Sum of squared gradients, shaped as the parameters."""

    sum_of_squares: optax.Updates


class MuonState(NamedTuple):
    """Exponential average of gradients, shaped as the parameters."""

    momentum: optax.Updates


def scale_by_adagrad(*, eps: float, initial: float) -> optax.GradientTransformation:
    """Divides by the root of the sum of squares, plus `eps`.

    `optax.scale_by_rss` adds eps inside the root, where 1e-10 acts as 1e-5 outside.
    """

    def init(params: optax.Params) -> AdagradState:
        return AdagradState(jax.tree.map(lambda p: jnp.full_like(p, initial), params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: Any = None,
    ) -> tuple[optax.Updates, AdagradState]:
        del params
        total = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, updates)
        scaled = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), updates, total)
        return scaled, AdagradState(total)

    return optax.GradientTransformation(init, update)


def scale_by_clipped_trust_ratio(
    *, smallest: float, largest: float
) -> optax.GradientTransformation:
    """LAMB's ratio of norms, kept within bounds as DeepSpeed's kernel does."""

    def scale(update: jax.Array, param: jax.Array) -> jax.Array:
        size, step = jnp.linalg.norm(param.ravel()), jnp.linalg.norm(update.ravel())
        has_ratio = (size > 0) & (step > 0)
        ratio = jnp.clip(size / jnp.where(has_ratio, step, 1.0), smallest, largest)
        return update * jnp.where(has_ratio, ratio, 1.0)

    return optax.stateless(lambda updates, params: jax.tree.map(scale, updates, params))


def scale_by_muon(*, beta: float, num_iterations: int) -> optax.GradientTransformation:
    """Orthogonalised Nesterov momentum of matrices, as Muon's author has it.

    `optax.contrib.scale_by_muon` corrects the momentum's bias; this does not.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: Any = None,
    ) -> tuple[optax.Updates, MuonState]:
        del params

        def mix(average: jax.Array, gradient: jax.Array) -> jax.Array:
            return beta * average + (1 - beta) * gradient

        momentum = jax.tree.map(mix, state.momentum, updates)
        ahead = jax.tree.map(mix, momentum, updates)
        steps = jax.tree.map(lambda x: _orthogonal_step(x, num_iterations), ahead)
        return steps, MuonState(momentum)

    return optax.GradientTransformation(init, update)


def _orthogonal_step(x_IO: jax.Array, num_iterations: int) -> jax.Array:
    """The nearest semi-orthogonal matrix, scaled by the root of outputs per input."""
    num_inputs, num_outputs = x_IO.shape
    is_tall = num_inputs > num_outputs
    x = x_IO.T if is_tall else x_IO
    x = x / (jnp.linalg.norm(x) + MATRIX_EPS)
    a, b, c = NEWTON_SCHULZ
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x) * max(1, num_outputs / num_inputs) ** 0.5
