"""Finds the parameters that a loss multiplies by activations, in its jaxpr.

The jaxpr is read once, without evaluating it. Each variable gets a `Fact`: whether it
depends on the batch, and whether it is a parameter, perhaps cast, transposed or
reshaped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zinf.core.jaxpr.compat import open_jaxpr
from zinf.core.jaxpr.dims import Dims, Shape, own_dims, union, viewed
from zinf.core.jaxpr.primitives import ELEMENTWISE, factors, having
from zinf.core.jaxpr.static_slice import is_dense
from zinf.core.jaxpr.walk import Follower

# What is computed from the scores of a choice along their last dim: a softmax begins
# with their largest entry.
CHOICES = having("choice")


@dataclass(frozen=True)
class Contraction:
    """How a parameter is multiplied by an activation, in dims of the parameter.

    Attributes:
        stack: leading dims of which one entry is taken first, as by a scan over layers.
        batch: dims that the activation has too, such as the dim of experts.
        inputs: dims that are summed over. They are several in an attention's output.
        outputs: all others.
        is_product: a product of matrices; False for a convolution.
    """

    stack: int
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_product: bool = True


@dataclass(frozen=True)
class Fact:
    """How a value of the loss relates to the parameters and to the batch.

    Attributes:
        path: the parameter that it is, or None.
        taken: leading dims of the parameter of which one entry was taken.
        dims: the parameter's dims in each dim of the value.
        is_active: whether it depends on the batch.
        scores: the parameters of whose product with an activation it is an elementwise
            function, with the outputs in the last dim.
    """

    path: str | None = None
    taken: int = 0
    dims: Dims = ()
    is_active: bool = False
    scores: frozenset[str] = frozenset()

    @property
    def value(self) -> "Fact":
        """The fact without the parameter: whether the value depends on the batch."""
        return Fact(is_active=self.is_active)


@dataclass
class Found:
    """How a loss uses its parameters, by key path.

    Attributes:
        contractions: parameters that are multiplied by activations.
        looked_up: parameters of which rows are looked up, such as embeddings.
        choosing: weights whose products choose, such as those of routers and heads.
    """

    contractions: dict[str, Contraction] = field(default_factory=dict)
    looked_up: set[str] = field(default_factory=set)
    choosing: set[str] = field(default_factory=set)

    @property
    def linear(self) -> list[str]:
        """Weights of linear layers: no embedding, router or output head."""
        left_out = self.looked_up | self.choosing
        return [
            path
            for path, contraction in self.contractions.items()
            if contraction.is_product and path not in left_out
        ]


def find_contractions(closed: Any, shapes: Mapping[str, Shape]) -> Found:
    """What the jaxpr of a loss does with its first inputs, the parameters.

    Args:
        shapes: the parameters by key path, in the order of the inputs.
    """
    jaxpr, _ = open_jaxpr(closed)
    facts = [Fact(p, 0, own_dims(shape)) for p, shape in shapes.items()]
    others = len(jaxpr.invars) - len(facts)
    finder = _Finder(shapes)
    finder.walk(closed, [*facts, *[Fact(is_active=True)] * others])
    return finder.found


class _Finder(Follower[Fact]):
    nothing = Fact()

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self.found = Found()

    def meet(self, first: Fact, second: Fact) -> Fact:
        return Fact(is_active=first.is_active or second.is_active)

    def carry(self, fact: Fact) -> Fact:
        return Fact(is_active=True)

    def chosen(self, by: Fact, fact: Fact) -> Fact:
        return self.meet(by, fact)

    def row(self, equation: Any, fact: Fact) -> Fact:
        if fact.path is None or not is_whole(
            fact.dims, self.shapes[fact.path], fact.taken
        ):
            return fact.value
        return replace(fact, taken=fact.taken + 1, dims=fact.dims[1:])

    def stack(self, equation: Any, fact: Fact) -> Fact:
        return fact.value

    def visit(self, equation: Any, facts: list[Fact]) -> list[Fact]:
        name = equation.primitive.name
        if len(facts) > 0 and facts[0].path is not None and len(equation.outvars) == 1:
            viewed = self.view(equation, facts)
            if viewed is not None:
                return [viewed]
        if name == "dot_general":
            return [self.dot(equation, facts)]
        if name == "ragged_dot_general":
            return [self.ragged_dot(equation, facts)]
        if name == "conv_general_dilated":
            return [self.convolution(equation, facts)]
        if name == "gather" and facts[0].path is not None and facts[1].is_active:
            self.found.looked_up.add(facts[0].path)
        if name in CHOICES and reduces_last_dim(equation):
            self.found.choosing |= facts[0].scores
        return self.plain(equation, facts)

    def plain(self, equation: Any, facts: list[Fact]) -> list[Fact]:
        """Facts of an equation without a rule: parameters lose their identity."""
        is_active = any(f.is_active for f in facts)
        active = [f for f in facts if f.is_active]
        keeps = (
            equation.primitive.name in ELEMENTWISE | {"reshape", "broadcast_in_dim"}
            # The sum of two activations is a residual stream, and no score.
            and (len(active) == 1 or equation.primitive.name == "select_n")
        )
        found = []
        for outvar in equation.outvars:
            scores: frozenset[str] = frozenset()
            if keeps:
                for atom, fact in zip(equation.invars, facts, strict=True):
                    if fact.scores and _has_last_dim(
                        atom.aval.shape, outvar.aval.shape
                    ):
                        scores |= fact.scores
            found.append(Fact(is_active=is_active, scores=scores))
        return found

    def view(self, equation: Any, facts: list[Fact]) -> Fact | None:
        """The fact after an equation that only rearranges a parameter; else None."""
        fact = facts[0]
        assert fact.path is not None
        shape = self.shapes[fact.path]
        dims = viewed(equation, fact.dims, shape)
        if dims is not None:
            return replace(fact, dims=dims)
        if is_row(equation) and is_whole(fact.dims, shape, fact.taken):
            # The dim stays, with size 1, until it is squeezed.
            return replace(fact, taken=fact.taken + 1, dims=((), *fact.dims[1:]))
        return None

    def dot(self, equation: Any, facts: list[Fact]) -> Fact:
        contract, batch = equation.params["dimension_numbers"]
        scores: frozenset[str] = frozenset()
        for side, other in ((0, 1), (1, 0)):
            fact = facts[side]
            if fact.path is None or not facts[other].is_active:
                continue
            inputs = union(fact.dims, contract[side])
            batched = union(fact.dims, batch[side])
            self.add(fact, batched, inputs)
            if side == 1:
                # The free dims of the right side come last.
                scores = frozenset([fact.path])
        is_active = any(f.is_active for f in facts)
        return Fact(is_active=is_active, scores=scores)

    def ragged_dot(self, equation: Any, facts: list[Fact]) -> Fact:
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (_, contract), (_, batch) = numbers.dot_dimension_numbers
        fact = facts[1]
        if fact.path is not None and facts[0].is_active:
            groups = union(fact.dims, numbers.rhs_group_dimensions)
            batched = (*union(fact.dims, batch), *groups)
            self.add(fact, batched, union(fact.dims, contract))
        return Fact(is_active=any(f.is_active for f in facts))

    def convolution(self, equation: Any, facts: list[Fact]) -> Fact:
        fact = facts[1]
        if fact.path is not None and facts[0].is_active:
            kernel = equation.params["dimension_numbers"].rhs_spec
            self.add(fact, (), union(fact.dims, kernel[1:]), is_product=False)
        return Fact(is_active=any(f.is_active for f in facts))

    def add(
        self,
        fact: Fact,
        batch: tuple[int, ...],
        inputs: tuple[int, ...],
        *,
        is_product: bool = True,
    ) -> None:
        assert fact.path is not None
        everything = {i for group in fact.dims for i in group}
        outputs = sorted(everything - {*batch, *inputs})
        if not inputs or not outputs:
            return
        found = Contraction(
            fact.taken,
            tuple(sorted(batch)),
            tuple(sorted(inputs)),
            tuple(outputs),
            is_product,
        )
        self.found.contractions.setdefault(fact.path, found)


def is_whole(dims: Dims, shape: Shape, taken: int) -> bool:
    """Whether a value is a parameter, or a row of it, that was only cast."""
    return dims == own_dims(shape)[taken:]


def is_row(equation: Any) -> bool:
    """Whether an equation takes one entry of the leading dim, and keeps the dim."""
    if equation.primitive.name != "dynamic_slice" and not is_dense(equation):
        return False
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return old[1:] == new[1:] and new[0] == 1


def reduces_last_dim(equation: Any) -> bool:
    """Whether a reduction or a sort is along the last dim of its first input."""
    last = equation.invars[0].aval.ndim - 1
    return not any(
        f.operands.get(0) == last and f.result is not None for f in factors(equation)
    )


def _has_last_dim(old: Shape, new: Shape) -> bool:
    return bool(old) and bool(new) and old[-1] == new[-1]
