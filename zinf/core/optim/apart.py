"""Clipping some leaves by the norm of their own gradients, where a transform does that.

Inside `optax.partition`, `optax.masked` or a condition, `optax.clip_by_global_norm`
couples the leaves that it sees. They are coupled by one number alone: the norm of their
gradients, which zinf has before the first update. So the traced update takes that norm
as an input, and nothing of it couples leaves any more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr import Emitter, Graph
from zinf.core.jaxpr.compat import Literal, Var, fresh
from zinf.core.optim.clipping import find_clip
from zinf.core.optim.coupling import dependencies, members
from zinf.core.optim.squares import added, root


@dataclass(frozen=True)
class NormGroups:
    """The sets of leaves whose norms an update reads, in the order in which it does.

    Leaves that are in the same groups are a class: squares are summed for each class,
    and the square of a group's norm is the sum over its classes.
    """

    paths: tuple[frozenset[str], ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def classes(self) -> dict[str, int]:
        """The class of each leaf that is in a group, by path: numbers from 1.

        Leaves of the same groups have the same class. Leaves of no group are left out;
        their class is 0.
        """
        leaves = sorted(set[str]().union(*self.paths))
        kinds = {path: tuple(path in group for group in self.paths) for path in leaves}
        numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kinds.values()), 1)}
        return {path: numbers[kind] for path, kind in kinds.items()}

    def norms(self, squares: Iterable[tuple[int, float]], factor: float) -> list[Any]:
        """The norm of each group, in float32.

        Args:
            squares: `(class, square)`; see [Note: wide sums of squares].
            factor: what every gradient is multiplied by before its update.
        """
        known = list(squares)
        found = []
        for group in self.paths:
            own = {self.classes[path] for path in group}
            total = added(square for number, square in known if number in own)
            # A step that is not finite is skipped, whatever it computes.
            with np.errstate(invalid="ignore", over="ignore"):
                found.append(np.float32(root(total, np) * factor))
        return found


NO_GROUPS = NormGroups()


def clip_apart(
    update: Graph, gradients: Sequence[Var], leaf_bits: Mapping[Var, int]
) -> tuple[Graph, tuple[tuple[int, ...], ...]]:
    """Gives an update the norms by which it clips the gradients of some leaves.

    Args:
        leaf_bits: the leaf, as a bit, of each input that belongs to one.

    Returns:
        The update, whose last inputs are the new norms, float32 scalars; and the
        numbers of the gradients that each is of.
    """
    found = dependencies(update, leaf_bits)
    norms: dict[int, Var] = {}
    scalar = update.invars[-1].aval  # The loss is a float32 scalar too.
    for bits in list(_coupled_roots(update, found)):
        group = [gradients[i] for i in members(bits)]
        while (clip := find_clip(update, group, found)) is not None:
            bound, names = clip
            norm = norms.setdefault(bits, fresh(scalar))
            update = _with_norm(update, group, names, bound, norm)
    update = replace(update, invars=(*update.invars, *norms.values()))
    return update, tuple(tuple(members(bits)) for bits in norms)


def _coupled_roots(update: Graph, found: Mapping[Var, int]) -> Iterator[int]:
    """The bit set of leaves behind each scalar square root of several leaves."""
    seen = set()
    for equation in update.equations:
        if equation.primitive.name == "sqrt" and equation.outvars[0].aval.shape == ():
            bits = found.get(equation.outvars[0], 0)
            if bits.bit_count() > 1 and bits not in seen:
                seen.add(bits)
                yield bits


def _with_norm(
    update: Graph,
    gradients: Sequence[Var],
    clipped: Mapping[Var, int],
    bound: float,
    norm: Var,
) -> Graph:
    """The update that clips by a norm that is given, with the formula of `Clipping`.

    Args:
        clipped: for each variable that is a clipped gradient, which of `gradients`.
    """
    emitter = Emitter()
    (factor,) = emitter.apply(lambda n: bound / jnp.maximum(n, bound), norm)
    results = [
        emitter.apply(lambda g, f: g * f.astype(g.dtype), gradient, factor)[0]
        for gradient in gradients
    ]
    assert not any(isinstance(x, Literal) for x in results)
    update = replace(update, equations=(*emitter.equations, *update.equations))
    renamed = update.reading({v: results[i] for v, i in clipped.items()})
    return renamed.needed_for(renamed.outvars)
