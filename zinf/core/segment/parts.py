"""Leaves sums over examples as one partial sum a device.

The gradient of a weight is a sum over rows (examples): a product that contracts them, a
sum over them, or rows that are added to zeros. What follows that sum and is linear,
such as transposes and casts, can be applied to each part of the sum. So a program is
rewritten: the sum runs by block of rows, one block a device, and what follows runs for
each block. All else stays as it is.

Rows are followed leniently, because nothing has to be proven: a sum may be cut into
parts wherever its rows are, so a wrong guess costs bytes between devices and never a
number. Means over the whole batch, batch norm and dropout need no rule.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zinf.core.jaxpr import Graph, variables
from zinf.core.jaxpr.compat import Equation, Literal, Var, build_jaxpr, evaluate
from zinf.core.jaxpr.dims import guessed_dim
from zinf.core.jaxpr.primitives import factors
from zinf.core.segment.row_sums import is_zeros

# Linear in all operands together.
LINEAR = frozenset(
    """transpose reshape convert_element_type neg squeeze broadcast_in_dim reduce_sum
    copy add_any add sub slice concatenate reduce_precision
    sharding_constraint""".split()
)


@dataclass
class PartialSums:
    """The sums over rows behind some outputs of a program.

    Attributes:
        graph: the program, without calls.
        seeds: the dim of rows of the inputs that have rows.
        wanted: numbers of the outputs that are left as parts if that is possible.
        count: the number of parts.
        sums: the results that are sums over rows: by operand, its dim of rows.
        numbers: those of `wanted` for which it is possible.
    """

    graph: Graph
    seeds: Mapping[Var, int]
    wanted: Sequence[int]
    count: int
    sums: dict[Var, dict[int, int]] = field(default_factory=dict)
    numbers: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._makers = {v: e for e in self.graph.equations for v in e.outvars}
        self._find_sums()
        linear = self._linear_in_sums()
        outvars = self.graph.outvars
        self.numbers = frozenset(
            n
            for n in self.wanted
            if not isinstance(outvars[n], Literal) and outvars[n] in linear
        )
        self._behind = self._behind_outputs(linear)

    def _find_sums(self) -> None:
        dims = dict(self.seeds)
        for equation in self.graph.equations:
            own = {
                n: dims[a]
                for n, a in enumerate(equation.invars)
                if not isinstance(a, Literal) and a in dims
            }
            if not own:
                continue
            summed = self._summed(equation, own)
            if summed is not None:
                self.sums[equation.outvars[0]] = summed
                continue
            dim = guessed_dim(equation, own)
            if dim is None and len(own) > 1:  # Follow one operand if they disagree.
                dim = guessed_dim(equation, dict([next(iter(own.items()))]))
            if dim is not None:
                shaped = (v for v in equation.outvars if v.aval.ndim > dim)
                dims.update(dict.fromkeys(shaped, dim))

    def _summed(
        self, equation: Equation, own: Mapping[int, int]
    ) -> dict[int, int] | None:
        """The operands' dims of rows if the equation is a sum over them, else None."""
        name = equation.primitive.name
        if name not in ("dot_general", "reduce_sum", "scatter-add"):
            return None
        if name == "scatter-add" and not is_zeros(equation.invars[0], self._makers):
            return None
        for factor in factors(equation):
            is_sum = factor.result is None and not factor.why_whole
            operands = factor.operands.items()
            if is_sum and not own.items().isdisjoint(operands):
                sizes = {equation.invars[n].aval.shape[d] for n, d in operands}
                return dict(operands) if not sizes.pop() % self.count else None
        return None

    def _linear_in_sums(self) -> set[Var]:
        """The values that are linear in sums over rows, and in nothing else."""
        found = set(self.sums)
        for equation in self.graph.equations:
            flags = [not isinstance(a, Literal) and a in found for a in equation.invars]
            if any(flags) and self._is_linear(equation, flags):
                found.update(equation.outvars)
        return found

    def _is_linear(self, equation: Equation, flags: list[bool]) -> bool:
        """Whether the results are linear in the operands with flags, and zero without.

        At least one operand has a flag.
        """
        first, *others = equation.invars
        match equation.primitive.name:
            case "mul":
                return sum(flags) == 1
            case "div":
                return not flags[1]
            case "pad":
                (filling,) = others
                return isinstance(filling, Literal) and not filling.val
            case "scatter-add":
                return flags == [False, False, True] and is_zeros(first, self._makers)
            case name:
                return name in LINEAR and all(flags)

    def _behind_outputs(self, linear: Collection[Var]) -> set[Var]:
        """The values that are computed in parts."""
        behind = {self.graph.outvars[n] for n in self.numbers}
        for equation in reversed(self.graph.equations):
            outvars = set(equation.outvars)
            if outvars & behind and not outvars & self.sums.keys():
                behind.update(v for v in variables(equation.invars) if v in linear)
        return behind

    def run(self, arguments: Sequence[Any], sharding: NamedSharding) -> list[Any]:
        """The outputs; of those in `numbers` the parts, (devices, ...).

        Args:
            sharding: cuts a leading dim among all devices.
        """
        values: dict[Var, Any] = dict(self.graph.consts)
        values.update(zip(self.graph.invars, arguments, strict=True))
        parts: dict[Var, Any] = {}

        def cut(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, sharding)

        def in_blocks(x: Any, dim: int) -> Any:
            shape = *x.shape[:dim], self.count, -1, *x.shape[dim + 1 :]
            return cut(jnp.moveaxis(x.reshape(shape), dim, 0))

        for equation in self.graph.equations:
            reads = list(dict.fromkeys(variables(equation.invars)))
            jaxpr = build_jaxpr(reads, equation.outvars, [equation])
            out = next(iter(equation.outvars), None)
            if out in self._behind:
                parts[out] = cut(self._part(equation, values, parts, in_blocks))
            given = [values[v] for v in reads]
            values.update(zip(equation.outvars, evaluate(jaxpr, given), strict=True))
        return [
            v.val
            if isinstance(v, Literal)
            else parts[v]
            if n in self.numbers
            else values[v]
            for n, v in enumerate(self.graph.outvars)
        ]

    def _part(
        self,
        equation: Equation,
        values: Mapping[Var, Any],
        parts: Mapping[Var, Any],
        in_blocks: Callable,
    ) -> Any:
        """The parts of the result of an equation, (devices, ...)."""
        out = equation.outvars[0]
        own = self.sums.get(out)
        given, axes = [], []
        for n, atom in enumerate(equation.invars):
            if isinstance(atom, Literal):
                given.append(atom.val)
                axes.append(None)
            elif own is not None and n in own:
                given.append(in_blocks(values[atom], own[n]))
                axes.append(0)
            elif own is None and atom in parts:
                given.append(parts[atom])
                axes.append(0)
            else:
                given.append(values[atom])
                axes.append(None)

        def alone(*operands: Any) -> Any:
            return equation.primitive.bind(*operands, **equation.params)

        return jax.vmap(alone, axes)(*given)
