"""Training with only `jax.jit`, `jax.value_and_grad` and optax, on one device.

This module defines in the simplest way what a step of zinf computes: the loss of each
microbatch on copies of the parameters in the compute dtype, the mean of the gradients
in float32, clipping, and the optax update of the parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf.core.jaxpr.compat import JAXPR_TYPES, open_jaxpr
from zinf.core.jaxpr.keys import is_key, to_words
from zinf.core.problem.problem import STATE_PREFIX, ParamSpec
from zinf.core.problem.source import named_leaves
from zinf.core.problem.state_rules import combined_tree
from zinf.core.problem.weighted import Weighted

# DeepSpeed and torch add this to the norm before they divide by it.
TORCH_EPSILON = 1e-6
GRADIENT_BYTES = 4  # per number of a gradient, in float32
KEY_BYTES = 16  # the largest size of a random key


@dataclass(frozen=True)
class Microbatches:
    """The inputs of one step: a batch and a key (or None) for each microbatch."""

    batches: Sequence[Any]
    keys: Sequence[Any]
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Noise:
    """Changes numbers by one unit in their last place, up or down at random.

    Attributes:
        unit: the unit in the last place of 1 in the coarsest dtype of the loss.
    """

    random: jax.Array
    unit: float

    def of_step(self, number: int) -> "Noise":
        return replace(self, random=jax.random.fold_in(self.random, number))

    def key(self, number: int) -> jax.Array:
        return jax.random.fold_in(self.random, number)


@dataclass(frozen=True)
class PlainRun:
    """The results of a run, on the host.

    Attributes:
        losses: the mean loss of each step.
        gradients: the gradients of the first step by path, before clipping.
        leaves: parameters and model state after the last step, by path.
    """

    losses: list[float]
    gradients: dict[str, np.ndarray]
    leaves: dict[str, np.ndarray]


@dataclass(frozen=True)
class PlainTraining:
    """Training of a loss function without segments, plans or stores.

    Attributes:
        loss_fn: as in `zinf.initialize`; `has_aux` and `has_state` say what it returns.
        specs: the parameters by key path, in the order of the flattened tree.
        structure: the structure of the parameter tree.
        clip_bound: the `gradient_clipping` of the config.
        averages_microbatches: `loss_average` of the config is "microbatches".
        state_rules: as of `Problem`.
    """

    loss_fn: Callable
    tx: optax.GradientTransformation
    specs: Mapping[str, ParamSpec]
    structure: Any
    has_aux: bool
    has_state: bool
    clip_bound: float | None
    averages_microbatches: bool = False
    state_rules: Mapping[str, str] = field(default_factory=dict)

    def run(
        self,
        params: Sequence[Any],
        state: Any,
        steps: Sequence[Microbatches],
        derivative: jax.stages.Compiled,
        *,
        gradient_scale: float = 1.0,
        noise: Noise | None = None,
    ) -> PlainRun:
        """Train for a few steps.

        Args:
            params: the leaves of the parameters, as masters.
            state: the model state; None if there is none.
            derivative: the result of `compile`.
            gradient_scale: the loss scale for the `gradients` of the result; each step
                has its own loss scale.
            noise: changes every number that a step reads from a parameter.
        """
        kept = [jnp.asarray(x) for x in params]
        optimizer = self.tx.init(self.for_optax(kept))
        losses, first = [], []
        for number, step in enumerate(steps):
            at = None if noise is None else noise.of_step(number)
            if not number:
                once = replace(step, loss_scale=gradient_scale)
                grads = self.gradients(kept, state, once, derivative, at)[1]
                first = [np.asarray(g) for g in grads]
            loss, grads, new_state = self.gradients(kept, state, step, derivative, at)
            losses.append(float(loss))
            new = self.update(kept, optimizer, grads, loss)
            if bool(new[-1]):  # is finite; fp16 skips a step that overflows
                kept, optimizer, state = *new[:-1], new_state
            if at is not None:
                kept = self.nudge(kept, at.key(1), 0.0)
        names = [path for path, spec in self.specs.items() if spec.is_trainable]
        leaves = dict(zip(self.specs, kept, strict=True))
        leaves |= {STATE_PREFIX + p: x for p, x in named_leaves(state).items()}
        return PlainRun(
            losses,
            dict(zip(names, first, strict=True)),
            {path: np.asarray(to_words(leaf)) for path, leaf in leaves.items()},
        )

    def gradients(
        self,
        kept: Any,
        state: Any,
        step: Microbatches,
        derivative: jax.stages.Compiled,
        noise: Noise | None,
    ) -> tuple[Any, list[Any], Any]:
        """The loss and the gradients of a batch, and the model state after it."""
        copies = self.copies(kept)
        if noise is not None:
            copies = self.nudge(copies, noise.key(0), noise.unit)
        inputs = list(zip(step.batches, step.keys, strict=True))
        scale = np.float32(step.loss_scale)
        seed, divisor = scale, np.float32(1)
        if step.loss_scale != 1:
            # What overflows in 16 bits depends on the derivative of the mean loss,
            # whose weight is known when all microbatches are.
            each = [derivative(copies, state, *given, scale)[0] for given in inputs]
            divisor = _summed(each).weight
            seed = scale / divisor
        losses, states, total = [], [], None
        for given in inputs:
            loss, grads, new = derivative(copies, state, *given, seed)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            losses.append(loss)
            states.append(new)
        summed = _summed(losses)
        mean = jax.tree.map(lambda x: x / (summed.weight / divisor * scale), total)
        if self.has_state and len(states) > 1:
            paths = [STATE_PREFIX + path for path in named_leaves(state)]
            return (
                summed.mean,
                mean,
                combined_tree(state, states, self.state_rules, paths),
            )
        return summed.mean, mean, states[0]

    @cached_property
    def copies(self) -> Callable:
        """Casts the parameters to the dtypes in which the loss reads them."""
        dtypes = [spec.compute.dtype for spec in self.specs.values()]

        def cast(kept: Sequence[Any]) -> list[Any]:
            return [
                x.astype(dtype) if spec.is_trainable else x
                for x, dtype, spec in zip(
                    kept, dtypes, self.specs.values(), strict=True
                )
            ]

        return jax.jit(cast)

    @cached_property
    def nudge(self) -> Callable:
        """`(leaves, key, unit) -> leaves`, with each trained number changed by one ulp.

        The ulp is that of the leaf's dtype, or `unit` (for the number 1) if larger.
        """
        trained = [spec.is_trainable for spec in self.specs.values()]

        def change(leaf: Any, key: Any, unit: Any) -> Any:
            up = jax.random.bernoulli(key, shape=leaf.shape)
            wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            part = jnp.maximum(unit, jnp.finfo(leaf.dtype).eps).astype(wide.dtype)
            changed = jnp.where(up, wide * (1 + part), wide * (1 - part))
            return changed.astype(leaf.dtype)

        def nudge(leaves: Sequence[Any], key: Any, unit: Any) -> list[Any]:
            keys = jax.random.split(key, len(leaves))
            return [
                change(x, keys[i], unit) if trained[i] else x
                for i, x in enumerate(leaves)
            ]

        return jax.jit(nudge)

    def unit(self, state: Any, step: Microbatches) -> float:
        """The unit in the last place of 1 in the coarsest dtype of the loss."""
        copies = [spec.compute for spec in self.specs.values()]
        batch, key = step.batches[0], step.keys[0]
        arguments = _as_given(copies, self.specs), state, batch, key, np.float32(1)
        found = _floats_in(jax.make_jaxpr(self.differentiate)(*arguments))
        return max(float(jnp.finfo(dtype).eps) for dtype in found)

    @cached_property
    def differentiate(self) -> jax.stages.Wrapped:
        """`(copies, state, batch, key, scale) -> loss, scaled gradients, new state`.

        The loss is a `Weighted`; the weight of a mean is 1. Gradients are those of the
        total.
        """
        trained = [spec.is_trainable for spec in self.specs.values()]

        def scaled(chosen: Any, copies: Any, state: Any, batch: Any, key: Any, scale):
            values = iter(chosen)
            leaves = [
                next(values) if is_trained else x
                for is_trained, x in zip(trained, copies, strict=True)
            ]
            trees = [jax.tree.unflatten(self.structure, leaves)]
            trees += [state] if self.has_state else []
            result = self.loss_fn(*trees, batch, *([] if key is None else [key]))
            new = None
            if self.has_state:
                result, new = result
                new = new[0] if self.has_aux else new
            elif self.has_aux:
                result, _ = result
            is_weighted = isinstance(result, Weighted)
            loss = result if is_weighted else Weighted(result, jnp.float32(1))
            if self.averages_microbatches:
                loss = Weighted(loss.mean, jnp.float32(1))
            return loss.total * scale.astype(loss.total.dtype), (loss, new)

        def differentiate(copies: Any, state: Any, batch: Any, key: Any, scale: Any):
            chosen = [x for x, t in zip(copies, trained, strict=True) if t]
            derivative = jax.value_and_grad(scaled, has_aux=True)
            (_, (loss, new)), grads = derivative(
                chosen, copies, state, batch, key, scale
            )
            loss = jax.tree.map(lambda x: x.astype(jnp.float32), loss)
            return loss, list(map(_widened, grads)), new

        return jax.jit(differentiate)

    @cached_property
    def update(self) -> Callable:
        """`(params, optimizer state, gradients, loss) -> new params, state, is_finite`.

        `is_finite` says whether the gradient norm is finite.
        """
        trained = [spec.is_trainable for spec in self.specs.values()]
        tx = optax.with_extra_args_support(self.tx)

        def update(kept: Any, optimizer: Any, grads: Any, loss: Any) -> Any:
            norm = optax.tree.norm(grads)
            if self.clip_bound is not None:
                factor = jnp.minimum(1.0, self.clip_bound / (norm + TORCH_EPSILON))
                grads = [g * factor for g in grads]
            values = iter(grads)
            full = [
                next(values).astype(x.dtype) if is_trained else x
                for is_trained, x in zip(trained, kept, strict=True)
            ]
            changes, optimizer = tx.update(
                self.for_optax(full), optimizer, self.for_optax(kept), value=loss
            )
            deltas = iter(jax.tree.leaves(changes))
            new = [
                (x + next(deltas)).astype(x.dtype) if is_trained else x
                for is_trained, x in zip(trained, kept, strict=True)
            ]
            return new, optimizer, jnp.isfinite(norm)

        return jax.jit(update)

    def for_optax(self, leaves: Sequence[Any]) -> Any:
        """The parameter tree of `leaves`, with frozen leaves masked."""
        specs = self.specs.values()
        chosen = [
            x if spec.is_trainable else optax.MaskedNode()
            for x, spec in zip(leaves, specs, strict=True)
        ]
        return jax.tree.unflatten(self.structure, chosen)

    def compile(self, state: Any, step: Microbatches) -> jax.stages.Compiled:
        """Compile the derivative of the loss on one microbatch, for `run`."""
        copies = [spec.compute for spec in self.specs.values()]
        batch, key = step.batches[0], step.keys[0]
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        arguments = _as_given(copies, self.specs), state, batch, key, scale
        return self.differentiate.lower(*arguments).compile()

    def state_bytes(self) -> int:
        """Bytes that an update holds: old and new state, one gradient and the sum."""
        masters = [spec.master for spec in self.specs.values()]
        kept = _as_given(masters, self.specs)
        optimizer = jax.eval_shape(self.tx.init, self.for_optax(kept))
        nbytes = sum(map(_nbytes, [*masters, *jax.tree.leaves(optimizer)]))
        return 2 * nbytes + 2 * self._gradient_bytes()

    def result_bytes(self) -> int:
        """Bytes of a `PlainRun`."""
        masters = (spec.master for spec in self.specs.values())
        return sum(map(_nbytes, masters)) + self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        trained = (x.master.size for x in self.specs.values() if x.is_trainable)
        return GRADIENT_BYTES * sum(trained)


def _as_given(stored: Sequence[Any], specs: Mapping[str, ParamSpec]) -> list[Any]:
    """`stored`, with the user's random keys where zinf stores words."""
    return [
        spec.given if is_key(spec.given) else x
        for x, spec in zip(stored, specs.values(), strict=True)
    ]


def _floats_in(closed: Any) -> set[Any]:
    """The floating-point dtypes of everything that a jaxpr computes."""
    jaxpr, _ = open_jaxpr(closed)
    found = set()
    for equation in jaxpr.eqns:
        dtypes = {v.aval.dtype for v in equation.outvars if hasattr(v.aval, "dtype")}
        found |= {d for d in dtypes if jnp.issubdtype(d, jnp.floating)}
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                found |= _floats_in(value)
    return found


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, JAXPR_TYPES)


def _nbytes(spec: Any) -> int:
    is_numbers = not is_key(spec)
    return spec.size * (spec.dtype.itemsize if is_numbers else KEY_BYTES)


def _summed(losses: Sequence[Weighted]) -> Weighted:
    return jax.tree.map(lambda *each: sum(each[1:], each[0]), *losses)


def _widened(gradient: jax.Array) -> jax.Array:
    return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
