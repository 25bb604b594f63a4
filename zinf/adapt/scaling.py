"""Finds the parameters whose entries are factors of the inputs of linear layers.

Input c of a linear layer often has a factor of its own: entry c of a norm's weight, or
output c of the linear layer before. Then that factor can be divided by s[c], and the
layer's weights of input c multiplied by s[c]: the loss stays the same, and AWQ
(https://arxiv.org/abs/2306.00978) chooses s so that rounding the weights changes it
less. The jaxpr of the loss is read once, without evaluating it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from zinf.core.jaxpr.compat import open_jaxpr
from zinf.core.jaxpr.dims import Dims, Shape, own_dims, viewed
from zinf.core.jaxpr.primitives import SAME
from zinf.core.jaxpr.walk import Follower
from zinf.core.problem.leafwise import abstract_leaves
from zinf.core.problem.source import named_leaves


@dataclass(frozen=True)
class Shared:
    """Linear layers with the same inputs, which have factors of their own.

    Attributes:
        layers: paths of the matrices that read the inputs, and nothing else does.
        factors: for each parameter that is a factor of the inputs, its dim along which
            there is an entry for each input: a norm's weight and bias, or a linear
            layer's. Nothing else reads these parameters.
    """

    layers: tuple[str, ...]
    factors: Mapping[str, int]


@dataclass(frozen=True)
class Fact:
    """How a value of the loss relates to the parameters.

    Attributes:
        path: the parameter that it is, or None.
        dims: the parameter's dims in each dim of the value.
        by: parameters of which entry c is a factor of every entry [..., c].
    """

    path: str | None = None
    dims: Dims = ()
    by: frozenset[str] = frozenset()


def shared_inputs(loss_fn: Callable, params: Any, *, batch: Any) -> tuple[Shared, ...]:
    """The linear layers whose inputs can be scaled without changing the loss.

    Args:
        params: a pytree, or a function that makes one.
        batch: an example, or its shapes.

    Returns:
        Each layer is in one at most, in the order of the loss.
    """
    abstract = abstract_leaves(params)
    shapes = {p: tuple(x.shape) for p, x in named_leaves(abstract).items()}
    closed = jax.make_jaxpr(loss_fn)(abstract, batch)
    finder = _Finder(shapes)
    others = len(open_jaxpr(closed)[0].invars) - len(shapes)
    facts = [Fact(path, own_dims(shape)) for path, shape in shapes.items()]
    for fact in finder.walk(closed, [*facts, *[Fact()] * others]):
        finder.spoil(fact)
    return finder.shared()


class _Finder(Follower[Fact]):
    nothing = Fact()

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        # Factors that cannot be scaled, and how often parameters are read: twice if in
        # a way that no rule knows.
        self._spoiled: set[str] = set()
        self._uses: Counter[str] = Counter()
        self._dims: dict[str, int] = {}
        # By factor: the layers whose inputs have it, and the biases added to it.
        self._layers: defaultdict[str, list[str]] = defaultdict(list)
        self._biases: defaultdict[str, list[str]] = defaultdict(list)

    def shared(self) -> tuple[Shared, ...]:
        found, taken = [], set()
        for factor, layers in self._layers.items():
            factors = [factor, *self._biases[factor]]
            used = [*factors, *layers]
            is_own = all(self._uses[path] == 1 for path in used)
            if (
                is_own
                and self._spoiled.isdisjoint(factors)
                and taken.isdisjoint(layers)
            ):
                taken.update(layers)
                dims = {path: self._dims[path] for path in factors}
                found.append(Shared(tuple(layers), dims))
        return tuple(found)

    def spoil(self, fact: Fact) -> None:
        """Note that a value is read in a way that scaled factors would change."""
        self._spoiled |= fact.by
        if fact.path is not None:
            self._uses[fact.path] += 2

    def meet(self, first: Fact, second: Fact) -> Fact:
        if first == second:
            return first
        self.spoil(first)
        self.spoil(second)
        return self.nothing

    def row(self, equation: Any, fact: Fact) -> Fact:
        self.spoil(fact)
        return self.nothing

    def stack(self, equation: Any, fact: Fact) -> Fact:
        self.spoil(fact)
        return self.nothing

    def visit(self, equation: Any, facts: list[Fact]) -> list[Fact]:
        if facts and facts[0].path is not None and len(facts) == 1:
            dims = viewed(equation, facts[0].dims, self._shapes[facts[0].path])
            if dims is not None:
                return [Fact(facts[0].path, dims)]
        rule = RULES.get(equation.primitive.name)
        found = None
        if rule is not None and any(f.path is not None or f.by for f in facts):
            found = rule(self, equation, facts)
        if found is not None:
            return [found]
        for fact in facts:
            self.spoil(fact)
        return [self.nothing] * len(equation.outvars)

    def keep(self, equation: Any, facts: list[Fact]) -> Fact | None:
        """The fact of a value with the same last dim, where that is clear."""
        old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        keeps = facts[0].path is None and old[-1:] == new[-1:]
        return facts[0] if keeps else None

    def product(self, equation: Any, facts: list[Fact]) -> Fact | None:
        by: set[str] = set()
        last = equation.outvars[0].aval.shape[-1:]
        for fact, atom in zip(facts, equation.invars, strict=True):
            factors = self._along_last(fact)
            if factors is None or factors and atom.aval.shape[-1:] != last:
                return None
            if by & factors:
                return None  # A factor counts twice, as in a square.
            by |= factors
        self._use(facts)
        return Fact(by=frozenset(by))

    def quotient(self, equation: Any, facts: list[Fact]) -> Fact | None:
        over = facts[1]
        is_plain = over.path is None and not over.by
        return self.product(equation, facts) if is_plain else None

    def sum(self, equation: Any, facts: list[Fact]) -> Fact | None:
        """The fact of a value with factors, to which a bias is added."""
        for value, bias in (facts, facts[::-1]):
            if value.by and bias.path is not None and self._along_last(bias):
                self._use([bias])
                for factor in value.by:
                    self._biases[factor].append(bias.path)
                return value
        return None

    def dot(self, equation: Any, facts: list[Fact]) -> Fact | None:
        contract, batch = equation.params["dimension_numbers"]
        side = 0 if facts[0].path is not None else 1
        weight, x = facts[side], facts[1 - side]
        is_matrix = weight.path is not None and sorted(weight.dims) == [(0,), (1,)]
        if not is_matrix or x.path is not None or batch[0] or len(contract[0]) != 1:
            return None
        assert weight.path is not None
        self._use([weight])
        rank = len(equation.invars[1 - side].aval.shape)
        if contract[1 - side][0] != rank - 1:
            self.spoil(x)
        for factor in x.by:
            self._layers[factor].append(weight.path)
        if side == 0:
            return self.nothing  # The outputs do not come last.
        (self._dims[weight.path],) = weight.dims[1 - contract[side][0]]
        return Fact(by=frozenset([weight.path]))

    def _along_last(self, fact: Fact) -> frozenset[str] | None:
        """The factors along a value's last dim; None for other parameters."""
        if fact.path is None:
            return fact.by
        if not fact.dims or fact.dims[-1] != (0,) or len(self._shapes[fact.path]) != 1:
            return None
        self._dims[fact.path] = 0
        return frozenset([fact.path])

    def _use(self, facts: list[Fact]) -> None:
        self._uses.update(f.path for f in facts if f.path is not None)


# How results of a primitive have the factors of its operands; of others none has.
RULES: dict[str, Callable[[_Finder, Any, list[Fact]], Fact | None]] = {
    **dict.fromkeys(SAME | {"reshape", "neg"}, _Finder.keep),
    "mul": _Finder.product,
    "div": _Finder.quotient,
    "add": _Finder.sum,
    "add_any": _Finder.sum,
    "dot_general": _Finder.dot,
}
