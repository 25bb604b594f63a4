"""Clipping by the global norm: found in a transform, and done once per step.

The global norm needs every gradient, so a transform that clips by it cannot be
separated by leaf. zinf has the norm anyway. A leading `optax.clip_by_global_norm` is
therefore taken off the traced update, and each gradient is multiplied by one factor
before it reaches the rest of the transform.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf.core.jaxpr import Graph, abstract, flatten, trace, variables
from zinf.core.jaxpr.compat import Literal, Var
from zinf.core.jaxpr.slice import EqualEquations
from zinf.core.sharding.mesh import first_cpu

# DeepSpeed and torch.nn.utils.clip_grad_norm_ add this to the norm before dividing.
TORCH_EPSILON = 1e-6
# The two ways of dividing, `(t / norm) * bound` and `t * (bound / norm)`, each round
# three times in float32.
PROBE_ROUNDING = 6 * np.finfo(np.float32).eps


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped by their global norm before the update.

    Attributes:
        torch_bound: `gradient_clipping` of the config. The factor is
            `min(1, bound / (norm + 1e-6))`, as in torch and DeepSpeed.
        optax_bounds: those of leading `optax.clip_by_global_norm`, in their order and
            after `torch_bound`. The factor of each is 1 if `norm < bound`, else
            `bound / norm`.
    """

    torch_bound: float | None = None
    optax_bounds: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return self.torch_bound is not None or bool(self.optax_bounds)

    def factor(self, norm: Any, xp: Any = np) -> Any:
        """The factor of every gradient, given their finite global norm.

        Args:
            norm: a scalar of `xp`: NumPy, or jax.numpy if the norm is traced.
        """
        factor = 1.0
        if self.torch_bound is not None:
            factor = xp.minimum(1.0, self.torch_bound / (norm + TORCH_EPSILON))
        for bound in self.optax_bounds:
            # Below the bound this multiplies by exactly 1.
            factor = factor * (bound / xp.maximum(norm * factor, bound))
        return factor


def peel_clipping(
    update: Graph, gradients: Sequence[Var], found: Mapping[Var, int]
) -> tuple[Graph, tuple[float, ...]]:
    """Takes leading `optax.clip_by_global_norm` off an update.

    It is recognised by its equations, which equal those of optax itself for these
    gradients and a bound that occurs in the update. Nothing else may read gradients.

    Args:
        found: the leaves behind each variable, as a bit set.

    Returns:
        The update of the clipped gradients, and the bounds in their order.
    """
    bounds: list[float] = []
    is_coupled = len(gradients) == 1 or any(b.bit_count() > 1 for b in found.values())
    while is_coupled:
        peeled = _peel_once(update, gradients, found)
        if peeled is None:
            break
        update, bound = peeled
        bounds.append(bound)
    return update, tuple(bounds)


def _peel_once(
    update: Graph, gradients: Sequence[Var], found: Mapping[Var, int]
) -> tuple[Graph, float] | None:
    clip = find_clip(update, gradients, found, is_alone=True)
    if clip is None:
        return None
    bound, clipped = clip
    renamed = update.reading({v: gradients[i] for v, i in clipped.items()})
    return renamed.needed_for(renamed.outvars), bound


def find_clip(
    update: Graph,
    gradients: Sequence[Var],
    found: Mapping[Var, int],
    *,
    is_alone: bool = False,
) -> tuple[float, dict[Var, int]] | None:
    """The bound of an `optax.clip_by_global_norm` of exactly these gradients.

    Args:
        found: the leaves behind each variable, as a bit set.
        is_alone: nothing else may read the gradients.

    Returns:
        The bound; and for each variable that is a clipped gradient, which one it is.
        None if the update has no such equations, or optax clips by another formula.
    """
    equal = EqualEquations()
    keys: dict[int, Hashable] = {}
    for equation in update.equations:
        if not equation.effects:
            keys[id(equation)] = key = equal.key(equation)
            equal.add(key, equation)
    for bound in _possible_bounds(update, found):
        match = _find(_optax_clipping(gradients, bound), gradients, equal.results)
        if match is None or not _is_as_optax(bound):
            continue
        clipped, matched = match
        others = [e for e in update.equations if keys.get(id(e)) not in matched]
        read = set(variables([*update.outvars, *(a for e in others for a in e.invars)]))
        if is_alone and not read.isdisjoint(gradients):
            continue
        names = {v: i for i, v in enumerate(clipped)}
        names |= {v: names[w] for v, w in equal.renamed.items() if w in names}
        return (bound, names) if not read.isdisjoint(names) else None
    return None


def _possible_bounds(update: Graph, found: Mapping[Var, int]) -> list[float]:
    """The positive numbers that the update combines with scalars from gradients."""
    numbers: dict[float, None] = {}
    for equation in update.equations:
        read = variables(equation.invars)
        if any(v.aval.shape == () and v in found for v in read):
            literals = (a for a in equation.invars if isinstance(a, Literal))
            values = (float(np.real(a.val)) for a in literals if np.ndim(a.val) == 0)
            numbers.update(dict.fromkeys(x for x in values if x > 0))
    return list(numbers)


def _optax_clipping(gradients: Sequence[Var], bound: float) -> Graph:
    """The equations of optax for gradients like these."""
    clip = optax.clip_by_global_norm(bound)

    def clipped(gradients: Any) -> Any:
        return clip.update(gradients, clip.init(gradients))[0]

    closed, _ = trace(clipped, [abstract(v.aval) for v in gradients])
    return flatten(closed)


def _find(
    pattern: Graph, inputs: Sequence[Var], results: Mapping[Hashable, Sequence[Var]]
) -> tuple[list[Var], set[Hashable]] | None:
    """The outputs of `pattern` on `inputs`, and its equations, if the update has all.

    Args:
        results: of the equations of the update, by key (`EqualEquations`).
    """
    there = EqualEquations()
    there.renamed.update(zip(pattern.invars, inputs, strict=True))
    matched = set()
    for equation in pattern.equations:
        key = there.key(equation)
        if key not in results:
            return None
        matched.add(key)
        there.renamed.update(zip(equation.outvars, results[key], strict=True))
    return there.rename(pattern.outvars), matched


def _is_as_optax(bound: float) -> bool:
    """Whether `Clipping.factor` equals the installed optax's, near a bound."""
    clip = optax.clip_by_global_norm(bound)
    for size in (0.25, 1.0, 3.0):
        gradients = [np.full(1, x * size * bound, np.float32) for x in (0.6, 0.8)]
        with jax.default_device(first_cpu()):
            inputs = [jnp.asarray(g) for g in gradients]
            wanted = jax.device_get(clip.update(inputs, clip.init(inputs))[0])
        norm = float(np.sqrt(sum(np.sum(np.square(g)) for g in gradients)))
        factor = Clipping(optax_bounds=(bound,)).factor(norm)
        pairs = zip(gradients, wanted, strict=True)
        if any(np.any(abs(g * factor - w) > PROBE_ROUNDING * w) for g, w in pairs):
            return False
    return True
