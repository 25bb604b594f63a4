"""Training with only `jax.jit`, `jax.value_and_grad` and optax, on one device.

This module defines in the simplest way what a step of zinf computes: the loss of each
microbatch on copies of the parameters in the compute dtype, the mean of the gradients
in float32, clipping, and the optax update of the parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf.core.jaxpr.compat import open_jaxpr
from zinf.core.jaxpr.keys import is_key, to_words
from zinf.core.jaxpr.walk import programs
from zinf.core.problem.problem import STATE_PREFIX, ParamSpec
from zinf.core.problem.source import named_leaves
from zinf.core.problem.state_rules import combined_tree
from zinf.core.problem.weighted import Weighted

# DeepSpeed and torch add this to the norm before they divide by it.
TORCH_EPSILON = 1e-6
GRADIENT_BYTES = 4  # per number of a gradient, in float32


@dataclass(frozen=True)
class Microbatches:
    """The inputs of one step: a batch and a key (or None) for each microbatch."""

    batches: Sequence[Any]
    keys: Sequence[Any]
    loss_scale: float = 1.0


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
        derivative: Callable,
        *,
        gradient_scale: float = 1.0,
        noise: tuple[jax.Array, float] | None = None,
    ) -> PlainRun:
        """Train for a few steps.

        Args:
            params: the leaves of the parameters, as masters.
            state: the model state; None if there is none.
            derivative: from `compile`.
            gradient_scale: the loss scale for the `gradients` of the result; each step
                has its own loss scale.
            noise: a random key, and a relative change of every number that a step reads
                from a parameter; masters change by one unit in their last place.
        """
        kept = [jnp.asarray(x) for x in params]
        optimizer = self.tx.init(self.for_optax(kept))
        losses, first = [], []

        def nudged(leaves: list[Any], number: int, is_master: bool) -> list[Any]:
            if noise is None:
                return leaves
            key = jax.random.fold_in(jax.random.fold_in(noise[0], number), is_master)
            return self.nudge(leaves, key, 0.0 if is_master else noise[1])

        for number, step in enumerate(steps):
            copies = nudged(self.copies(kept), number, False)
            if not number:
                once = replace(step, loss_scale=gradient_scale)
                first = self.gradients(copies, state, once, derivative)[1]
                first = list(map(np.asarray, first))
            loss, grads, new_state = self.gradients(copies, state, step, derivative)
            losses.append(float(loss))
            new = self.update(kept, optimizer, grads, loss)
            if bool(new[-1]):  # is finite; fp16 skips a step that overflows
                kept, optimizer, state = *new[:-1], new_state
            kept = nudged(kept, number, True)
        leaves = dict(zip(self.specs, kept, strict=True))
        leaves |= {STATE_PREFIX + p: x for p, x in named_leaves(state).items()}
        return PlainRun(
            losses,
            dict(zip(self.trained(self.specs), first, strict=True)),
            {path: np.asarray(to_words(leaf)) for path, leaf in leaves.items()},
        )

    def gradients(
        self, copies: Any, state: Any, step: Microbatches, derivative: Callable
    ) -> tuple[Any, list[Any], Any]:
        """The loss and the gradients of a batch, and the model state after it."""
        inputs = list(zip(step.batches, step.keys, strict=True))
        scale = np.float32(step.loss_scale)
        seed, divisor = scale, np.float32(1)
        if step.loss_scale != 1:
            # Overflows in 16 bits depend on the scale of the derivative, so the weight
            # of the mean loss is computed first, over all microbatches.
            each = [derivative(copies, state, *given, scale)[0] for given in inputs]
            divisor = _summed(each).weight
            seed = scale / divisor
        each = [derivative(copies, state, *given, seed) for given in inputs]
        losses, grads, states = map(list, zip(*each, strict=True))
        loss = _summed(losses)
        factor = loss.weight / divisor * scale
        mean = jax.tree.map(lambda x: x / factor, _summed(grads))
        if not self.has_state or len(states) == 1:
            return loss.mean, mean, states[0]
        paths = [STATE_PREFIX + path for path in named_leaves(state)]
        return loss.mean, mean, combined_tree(state, states, self.state_rules, paths)

    def trained(self, leaves: Iterable[Any]) -> list[Any]:
        """The leaves that are trained."""
        pairs = zip(leaves, self.specs.values(), strict=True)
        return [x for x, spec in pairs if spec.is_trainable]

    def merged(self, trained: Iterable[Any], leaves: Iterable[Any]) -> list[Any]:
        """The leaves, with `trained` in place of those that are."""
        values, pairs = iter(trained), zip(leaves, self.specs.values(), strict=True)
        return [next(values) if spec.is_trainable else x for x, spec in pairs]

    @cached_property
    def copies(self) -> Callable:
        """Casts the parameters to the dtypes in which the loss reads them."""
        dtypes = self.trained(spec.compute.dtype for spec in self.specs.values())

        def cast(kept: Sequence[Any]) -> list[Any]:
            pairs = zip(self.trained(kept), dtypes, strict=True)
            return self.merged([x.astype(dtype) for x, dtype in pairs], kept)

        return jax.jit(cast)

    @cached_property
    def nudge(self) -> Callable:
        """`(leaves, key, unit) -> leaves`: each trained number one ulp up or down.

        The ulp is that of the leaf's dtype, or `unit` (for the number 1) if larger.
        """

        def change(leaf: Any, key: Any, unit: Any) -> Any:
            up = jax.random.bernoulli(key, shape=leaf.shape)
            wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            part = jnp.maximum(unit, jnp.finfo(leaf.dtype).eps).astype(wide.dtype)
            changed = jnp.where(up, wide * (1 + part), wide * (1 - part))
            return changed.astype(leaf.dtype)

        def nudge(leaves: Sequence[Any], key: Any, unit: Any) -> list[Any]:
            keys = list(jax.random.split(key, len(leaves)))
            pairs = zip(self.trained(leaves), self.trained(keys), strict=True)
            return self.merged([change(x, k, unit) for x, k in pairs], leaves)

        return jax.jit(nudge)

    def compile(self, state: Any, step: Microbatches) -> tuple[Callable, float, int]:
        """The compiled derivative of the loss on one microbatch, for `run`.

        Returns:
            the derivative; the unit in the last place of 1 in the coarsest dtype that
            it computes in; the bytes of its intermediate values.
        """
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        copies = self._given(spec.compute for spec in self.specs.values())
        traced = self.differentiate.trace(
            copies, state, step.batches[0], step.keys[0], scale
        )
        compiled = traced.lower().compile()
        memory = compiled.memory_analysis()
        unit = max(float(jnp.finfo(dtype).eps) for dtype in _floats(traced.jaxpr))
        return compiled, unit, memory.temp_size_in_bytes if memory else 0

    @cached_property
    def differentiate(self) -> jax.stages.Wrapped:
        """`(copies, state, batch, key, scale) -> loss, scaled gradients, new state`.

        The loss is a `Weighted`; the weight of a mean is 1. Gradients are those of the
        total.
        """

        def scaled(chosen: Any, copies: Any, state: Any, batch: Any, key: Any, scale):
            trees = [jax.tree.unflatten(self.structure, self.merged(chosen, copies))]
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

        def differentiate(copies: Any, *rest: Any):
            derivative = jax.value_and_grad(scaled, has_aux=True)
            (_, (loss, new)), grads = derivative(self.trained(copies), copies, *rest)
            loss = jax.tree.map(lambda x: x.astype(jnp.float32), loss)
            return loss, list(map(_widened, grads)), new

        return jax.jit(differentiate)

    @cached_property
    def update(self) -> Callable:
        """`(params, optimizer state, gradients, loss) -> new params, state, is_finite`.

        `is_finite` says whether the gradient norm is finite.
        """
        tx = optax.with_extra_args_support(self.tx)

        def update(kept: Any, optimizer: Any, grads: Any, loss: Any) -> Any:
            norm = optax.tree.norm(grads)
            if self.clip_bound is not None:
                factor = jnp.minimum(1.0, self.clip_bound / (norm + TORCH_EPSILON))
                grads = [g * factor for g in grads]
            masters = self.trained(kept)
            grads = [g.astype(x.dtype) for g, x in zip(grads, masters, strict=True)]
            full = self.for_optax(self.merged(grads, kept))
            changes, optimizer = tx.update(
                full, optimizer, self.for_optax(kept), value=loss
            )
            pairs = zip(masters, jax.tree.leaves(changes), strict=True)
            new = self.merged([(x + d).astype(x.dtype) for x, d in pairs], kept)
            return new, optimizer, jnp.isfinite(norm)

        return jax.jit(update)

    def for_optax(self, leaves: Sequence[Any]) -> Any:
        """The parameter tree of `leaves`, with frozen leaves masked."""
        masked = [optax.MaskedNode()] * len(leaves)
        chosen = self.merged(self.trained(leaves), masked)
        return jax.tree.unflatten(self.structure, chosen)

    def needed_bytes(self) -> tuple[int, int]:
        """Bytes that an update holds, and bytes of a `PlainRun`.

        An update holds old and new state, one gradient and the sum of gradients.
        """
        masters = [spec.master for spec in self.specs.values()]
        optimizer = jax.eval_shape(self.tx.init, self.for_optax(self._given(masters)))
        gradients = GRADIENT_BYTES * sum(x.size for x in self.trained(masters))
        result = sum(map(_nbytes, masters)) + gradients
        state = sum(map(_nbytes, jax.tree.leaves(optimizer)))
        return 2 * (result + state), result

    def _given(self, stored: Iterable[Any]) -> list[Any]:
        """`stored`, with the user's random keys where zinf stores words."""
        pairs = zip(stored, self.specs.values(), strict=True)
        return [spec.given if is_key(spec.given) else x for x, spec in pairs]


def _floats(closed: Any) -> Iterator[Any]:
    """The floating-point dtypes of everything that a jaxpr computes."""
    for equation in open_jaxpr(closed)[0].eqns:
        dtypes = (getattr(v.aval, "dtype", jnp.int32) for v in equation.outvars)
        yield from (d for d in dtypes if jnp.issubdtype(d, jnp.floating))
        for program in programs(equation):
            yield from _floats(program)


def _nbytes(spec: Any) -> int:
    return spec.size * spec.dtype.itemsize


def _summed(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *each: sum(each[1:], each[0]), *trees)


def _widened(gradient: jax.Array) -> jax.Array:
    return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
