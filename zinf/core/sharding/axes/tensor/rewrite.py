"""Keeps dims apart that a program merges, where devices could divide the inner one.

BLOOM's attention reshapes values (examples, heads, ...) to (examples * heads, ...) for
its products. Devices that divide heads and examples have no block of such a dim, and
XLA would gather the heads. So values stay (examples, heads, ...), and what runs between
such a reshape and the one that undoes it runs for each entry of the first dim, under
`jax.vmap`. The same numbers are computed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from zinf.core.jaxpr import Emitter, Graph, abstract, flatten, trace, written
from zinf.core.jaxpr.compat import Atom, Equation, Literal, open_jaxpr, with_inner
from zinf.core.jaxpr.dims import (
    Merge,
    NotByRow,
    Shape,
    factor_of,
    is_opaque,
    resized_params,
    split,
)
from zinf.core.jaxpr.primitives import keeps_order
from zinf.core.jaxpr.rewrite import (
    as_graph,
    rewriting,
    rewritten_program,
    weakly_typed,
)
from zinf.core.jaxpr.walk import REMAT, apply, inner
from zinf.core.sharding.axes.convolution import without_groups
from zinf.core.sharding.axes.tensor.cuts import Cuts, find_cuts
from zinf.core.sharding.mesh import TENSOR, Dim
from zinf.core.sharding.rule import AxisRule

# A dim of a value, and the number of blocks that it consists of.
Merged = tuple[int, int]


def along_tensor(loss: Callable, rule: AxisRule) -> Callable:
    """`loss(params, batch, ...)` as devices along `tensor` can divide it.

    It is traceable only. Without a `tensor` axis it is `loss` itself.
    """
    return _along(loss, rule, lambda closed: without_groups(closed, TENSOR))


def forward_along_tensor(function: Callable, rule: AxisRule) -> Callable:
    """`along_tensor` of a function that has no gradients."""
    return _along(function, rule, lambda closed: closed)


def _along(function: Callable, rule: AxisRule, first: Callable) -> Callable:
    """A function without merged dims.

    Args:
        first: what is done to its closed jaxpr before.
    """
    if rule.size(Dim.CHANNELS) == 1:
        return function

    def write(closed: Any, arguments: Sequence[Any]) -> Graph:
        closed = first(closed)
        num_params = len(jax.tree.leaves(arguments[0]))
        return _unmerged(closed, num_params, rule) or as_graph(closed)

    return rewriting(function, write)


def _unmerged(closed: Any, num_params: int, rule: AxisRule) -> Graph | None:
    """A program without reshapes that alone keep weights whole.

    None if no more weights could be cut then.

    Args:
        num_params: the parameters are its first inputs.
    """

    def cuts(program: Any) -> Cuts:
        params = open_jaxpr(program)[0].invars[:num_params]
        names = {v: str(n) for n, v in enumerate(params)}
        graph, parts = flatten(program, stacked=tuple(params)), rule.size(Dim.CHANNELS)
        return find_cuts(graph, names, parts, min_bytes=rule.min_bytes)

    before = cuts(closed)
    if not before.merges:
        return None
    graph = written(_Unmerger(before.merges), closed)
    specs = [weakly_typed(v.aval) for v in graph.invars]
    after = cuts(trace(graph, *specs)[0]).dims
    return graph if after.items() > before.dims.items() else None


class _Unmerger(Emitter):
    """Writes a program again in which some dims are two.

    Attributes:
        merges: the reshapes that are left out, by the shapes of operand and result.
        sources: for a value that a reshape made, the value that was reshaped.
        merged: the values of which the source has one dim as two.
    """

    def __init__(self, merges: Sequence[Merge]):
        super().__init__()
        self.merges = {(m.old, m.new): (m.dim, m.outer) for m in merges}
        self.left_out = merges
        self.sources: dict[Atom, Atom] = {}
        self.merged: dict[Atom, Merged] = {}

    def emit(self, equation: Equation, arguments: list[Atom]) -> list[Atom]:
        equation = equation.replace(invars=arguments)
        name = equation.primitive.name
        if name in REMAT or name == "scan":
            return self.open(equation)
        if name == "reshape" and keeps_order(equation):
            return [self.reshape(equation)]
        if is_opaque(equation):
            return super().emit(equation, arguments)
        found = self.followed(equation)
        return self.append(equation) if found is None else self.apart(equation, *found)

    def open(self, equation: Equation) -> list[Atom]:
        (inside,) = inner(equation)
        body, _ = rewritten_program(_Unmerger(self.left_out), inside.program)
        return self.append(with_inner(equation, body) or equation)

    def reshape(self, equation: Equation) -> Atom:
        (atom,), shape = equation.invars, equation.outvars[0].aval.shape
        old = atom.aval.shape
        merged, before = self.merges.get((old, shape)), self.merged_dim(atom)
        if before is not None and shape[: before[0] + 1] == old[: before[0] + 1]:
            merged = before
        if merged is None:
            return self.show(atom, shape)
        return self.merge(self.show(atom, split(shape, *merged)), shape, merged)

    def show(self, atom: Atom, shape: Shape) -> Atom:
        """The entries of a value in another shape."""
        source = atom if isinstance(atom, Literal) else self.sources.get(atom, atom)
        if source.aval.shape == shape:
            return source
        closed, _ = trace(lambda x: jax.lax.reshape(x, shape), abstract(source.aval))
        (equation,) = open_jaxpr(closed)[0].eqns
        (new,) = self.append(equation.replace(invars=[source]))
        self.sources[new] = source
        return new

    def merge(self, value: Atom, shape: Shape, merged: Merged) -> Atom:
        """A value with one dim as two, as the program has it.

        The reshape is dead code if all that reads the value is followed.
        """
        whole = self.show(value, shape)
        self.merged[whole] = merged
        return whole

    def merged_dim(self, atom: Atom) -> Merged | None:
        return None if isinstance(atom, Literal) else self.merged.get(atom)

    def followed(self, equation: Equation) -> tuple[Mapping[int, int], int, int] | None:
        """The merged dims of operands, by number, that of results, and their blocks.

        None if there are no such dims, or if blocks depend on each other.
        """
        found = {n: self.merged_dim(a) for n, a in enumerate(equation.invars)}
        known = {n: merged for n, merged in found.items() if merged is not None}
        outers = {outer for _, outer in known.values()}
        if len(outers) != 1:
            return None
        try:
            factor = factor_of(equation, {n: dim for n, (dim, _) in known.items()})
        except NotByRow:
            return None
        if factor.result is None:
            return None
        return factor.operands, factor.result, outers.pop()

    def apart(
        self, equation: Equation, dims: Mapping[int, int], dim: int, outer: int
    ) -> list[Atom]:
        """Runs an equation for each of `outer` blocks of merged dims.

        Args:
            dims: by the number of an operand, its dim.
            dim: that of the results.
        """
        operands = list(equation.invars)
        for n, place in dims.items():
            shape = split(operands[n].aval.shape, place, outer)
            operands[n] = self.show(operands[n], shape)
        shapes = [v.aval.shape for v in equation.outvars]
        params = resized_params(equation, dim, shapes[0][dim] // outer)
        block = equation.replace(params=params)
        run = jax.vmap(
            lambda *values: apply(block, values),
            in_axes=[dims.get(n) for n in range(len(operands))],
            out_axes=dim,
        )
        values = self.apply(run, *operands)
        pairs = zip(values, shapes, strict=True)
        return [self.merge(value, shape, (dim, outer)) for value, shape in pairs]
