"""Megatron's cuts inside one expert: what each device computes of it.

DeepSpeed-TED (https://arxiv.org/abs/2303.06318) cuts experts as it cuts the MLPs of
dense layers: the first weights by columns, the last by rows. `find_cuts` finds the dims
in the expert's program. A device calls the expert's own function with its parts of the
weights, and the sum of what devices get is the expert's result. That holds if all that
follows the product with the last weight is linear; what is added there, such as a bias,
is added on one device only.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zinf.core.jaxpr import Graph, flatten, inlined, trace, variables
from zinf.core.jaxpr.compat import Equation, Literal, Var
from zinf.core.jaxpr.dims import NotByRow, factor_of
from zinf.core.jaxpr.primitives import ELEMENTWISE, LINEAR
from zinf.core.sharding.axes.experts import ExpertParts
from zinf.core.sharding.axes.tensor.cuts import find_cuts


class _Refused(Exception):
    """Why an expert cannot be cut inside."""


def cut_expert(function: Callable, one: Any, rows: Any, parts: int) -> ExpertParts:
    """How `parts` devices divide the weights of each expert.

    Args:
        function: `function(weights_of_one, rows)`, as `zinf.moe.experts` takes it.
        one: shapes and dtypes of one expert's weights, a pytree.
        rows: shape and dtype of a block of tokens.

    Raises:
        ValueError: the expert cannot be cut, and why.
    """
    closed, _ = trace(function, one, rows)
    graph = flatten(closed)
    leaves, structure = jax.tree.flatten(one)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(one)
    ]
    named = dict(zip(graph.invars, paths, strict=False))
    try:
        cuts = find_cuts(graph, named, parts)
        if not cuts.dims:
            listed = [f"{path} ({why})" for path, why in cuts.reasons.items()]
            raise _Refused(", ".join(listed) or "no weight has two dims")
        flat = inlined(graph)
        dims = {v: cuts.dims[path] for v, path in named.items() if path in cuts.dims}
        added = _Check(flat, dims, set(named)).added
        own = [_part(x, dims.get(v), parts) for v, x in zip(named, leaves, strict=True)]
        _check_alike(function, jax.tree.unflatten(structure, own), rows, flat)
    except _Refused as reason:
        raise ValueError(
            f"expert_tensor_parallel_size = {parts} divides the weights of each expert "
            f"among devices, and this model's experts cannot be divided: {reason}. "
            "Set it to 1, which leaves experts whole and divides their tokens."
        ) from None
    return ExpertParts(
        tuple(dims.get(v) for v in named), tuple(v in added for v in named)
    )


def _part(leaf: Any, dim: int | None, parts: int) -> jax.ShapeDtypeStruct:
    shape = list(leaf.shape)
    if dim is not None:
        shape[dim] //= parts
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


class _Check:
    """Follows cut dims through an expert's program, up to sums over devices.

    Attributes:
        cut: the dim along which a device has a part of a value.
        partial: values that are sums over devices of what each has.
        uniform: values equal along some dims, so that any part of them is at hand.
        added: weights that are only added to such sums.
    """

    def __init__(self, graph: Graph, dims: Mapping[Var, int], weights: set[Var]):
        self.cut = dict(dims)
        self.partial: set[Var] = set()
        self.added: set[Var] = set()
        self.uniform: dict[Var, frozenset[int]] = {}
        # The whole weight that a value is a linear function of.
        self.origin: dict[Var, Var] = {v: v for v in weights if v not in dims}
        atoms = [a for e in graph.equations for a in e.invars]
        self.uses = Counter(variables([*atoms, *graph.outvars]))
        for equation in graph.equations:
            self.follow(equation)
        if not all(v in self.partial for v in variables(graph.outvars)):
            raise _Refused("its result is no product with a weight that is cut")

    def follow(self, equation: Equation) -> None:
        name = equation.primitive.name
        dims = {n: self.cut[a] for n, a in self.read(equation) if a in self.cut}
        parts = {n for n, a in self.read(equation) if a in self.partial}
        if dims and parts:
            raise _Refused(f"`{name}` of hidden values and of their sum")
        if dims:
            self.follow_cut(equation, dims)
        elif parts:
            self.follow_partial(equation, parts)
        else:
            self.follow_whole(equation)

    def read(self, equation: Equation) -> list[tuple[int, Var]]:
        atoms = enumerate(equation.invars)
        return [(n, a) for n, a in atoms if not isinstance(a, Literal)]

    def follow_cut(self, equation: Equation, dims: dict[int, int]) -> None:
        try:
            factor = factor_of(equation, dims)
        except NotByRow as reason:
            raise _Refused(str(reason)) from None
        for number, dim in factor.operands.items():
            atom = equation.invars[number]
            # A literal is a scalar.
            if dim not in self.uniform.get(atom, ()) and number not in dims:
                name = equation.primitive.name
                raise _Refused(f"`{name}` of hidden values and a value that is whole")
        for v in equation.outvars:
            if factor.result is None:
                self.partial.add(v)
            else:
                self.cut[v] = factor.result

    def follow_partial(self, equation: Equation, parts: set[int]) -> None:
        name = equation.primitive.name
        is_linear = (
            name in LINEAR
            or (name in ("mul", "dot_general") and len(parts) == 1)
            or (name == "div" and parts == {0})
        )
        if name in ("add", "add_any"):
            for number, atom in enumerate(equation.invars):
                if number not in parts:
                    self.add(atom)
        elif not is_linear:
            raise _Refused(f"`{name}` of the sum over hidden values")
        self.partial.update(equation.outvars)

    def add(self, atom: Any) -> None:
        """One device adds a value if it comes from a weight that nothing else reads."""
        weight = None if isinstance(atom, Literal) else self.origin.get(atom)
        if weight is None or self.uses[weight] > 1 or self.uses[atom] > 1:
            raise _Refused("it adds more to the sum over hidden values than a weight")
        self.added.add(weight)

    def follow_whole(self, equation: Equation) -> None:
        name = equation.primitive.name
        (out, *others) = equation.outvars
        if name in LINEAR:
            for _, atom in self.read(equation):
                if atom in self.origin and self.uses[atom] == 1:
                    self.origin[out] = self.origin[atom]
        if name == "broadcast_in_dim":
            kept = dict(enumerate(equation.params["broadcast_dimensions"]))
            shape = equation.invars[0].aval.shape
            moved = {to for dim, to in kept.items() if shape[dim] > 1}
            self.uniform[out] = frozenset(range(out.aval.ndim)) - moved
        elif name in ELEMENTWISE and not others:
            everywhere = frozenset(range(out.aval.ndim))
            for _, atom in self.read(equation):
                if atom.aval.ndim:
                    everywhere &= self.uniform.get(atom, frozenset())
            self.uniform[out] = everywhere


def _check_alike(function: Callable, own: Any, rows: Any, whole: Graph) -> None:
    """Raise unless the function computes the same on parts of weights.

    A function may read sizes off its arguments, and scale by them.
    """
    try:
        part = inlined(flatten(trace(function, own, rows)[0]))
    except (TypeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise _Refused(f"it cannot be called with parts of them ({reason})") from None
    if list(map(_fixed, part.equations)) != list(map(_fixed, whole.equations)):
        raise _Refused("what it computes depends on the sizes of its weights")


def _fixed(equation: Equation) -> tuple:
    """The primitive, literals and parameters of an equation, without shapes."""
    literals = [
        np.asarray(a.val).tolist() if isinstance(a, Literal) else None
        for a in equation.invars
    ]
    kinds = (bool, int, float, str)
    params = {k: v for k, v in equation.params.items() if isinstance(v, kinds)}
    return equation.primitive.name, literals, params
