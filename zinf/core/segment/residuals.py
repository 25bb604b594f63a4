"""Splits a pass in two: which residuals to save, and what to recompute.

jax saves everything that its backward pass reads. Here arguments are not saved again,
and cheap equations are recomputed: the saved residuals are the fewest bytes from which
cheap equations compute the rest. Values that jax itself recomputes in the backward pass
(`jax.checkpoint`, some `custom_vjp` rules) are left to jax.

To save still less, matmuls with few operations per byte are recomputed as well:
selective activation recomputation (Korthikanti et al. 2022, arXiv:2205.05198, section
5), found in the jaxpr and not by name. Attention scores are such matmuls, and in a
long sequence the largest residuals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from zinf.core.jaxpr import Graph, flatten, trace, variables
from zinf.core.jaxpr.compat import Atom, Equation, Var
from zinf.core.jaxpr.keys import from_words, to_words
from zinf.core.jaxpr.primitives import CHEAP, having
from zinf.core.jaxpr.slice import Slicer, merge_equal
from zinf.core.program import ArraySpec
from zinf.core.segment.flops import equation_flops
from zinf.core.segment.leaves import array_spec
from zinf.core.segment.min_cut import min_vertex_cut

COMPUTED_AGAIN, MATMULS = CHEAP | having("fused"), having("matmul")
# A matmul with at most this many operations per byte of its result is cheap for its
# size: scores of heads of width 128, in float32. An accelerator does more operations in
# the time of moving one byte (an H100 about 300), so reading a saved result would not
# be faster.
SELECTIVE_FLOPS_PER_BYTE = 64


@dataclass(frozen=True)
class Halves:
    """A forward pass that keeps the variables `kept`, and a backward pass from them.

    Attributes:
        forward: arguments -> `num_outputs` outputs, then what is kept.
        again: arguments, residuals -> everything that `backward` reads.
        backward: results of `again`, cotangents -> cotangents of the arguments.
    """

    kept: tuple[Var, ...]
    num_outputs: int
    forward: Graph
    again: Graph
    backward: Graph

    def residuals(self) -> tuple[ArraySpec, ...]:
        return tuple(array_spec(v.aval) for v in self.kept)

    @property
    def flops_again(self) -> int:
        """Floating-point operations of the matmuls that run again."""
        equations = self.again.equations
        return sum(map(equation_flops, filter(_is_matmul, equations)))

    def run_forward(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """`(outputs, residuals)`; traceable, random keys as words."""
        results = [to_words(y) for y in self.forward(*arguments)]
        return results[: self.num_outputs], results[self.num_outputs :]

    def run_backward(
        self,
        arguments: Sequence[Any],
        residuals: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> list[Any]:
        """The cotangents of the arguments; traceable."""
        pairs = zip(residuals, self.kept, strict=True)
        kept = [from_words(x, v.aval) for x, v in pairs]
        return self.backward(*self.again(*arguments, *kept), *cotangents)


def halve(
    linearize: Callable,
    arguments: Sequence[Any],
    cotangents: Sequence[Any],
    *,
    inputs: slice,
    is_selective: bool = False,
) -> Halves:
    """Halves `linearize(arguments) -> outputs, vjp`, where `vjp` is that of `jax.vjp`.

    Args:
        arguments, cotangents: their shapes and dtypes.
        inputs: the arguments that differ between microbatches. Values that depend on
            none of them (casts of parameters, masks) are always recomputed: saved,
            there would be one for each microbatch.
        is_selective: whether matmuls that are cheap for their size are recomputed.
    """
    structures = []

    def forward_pass(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs, vjp = linearize(arguments)
        leaves, structure = jax.tree.flatten(vjp)
        structures.append(structure)
        return outputs, leaves

    def backward_pass(leaves: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        vjp = jax.tree.unflatten(structures[0], leaves)
        return vjp(list(cotangents))[0]

    closed, (outputs, leaves) = trace(forward_pass, tuple(arguments))
    early = merge_equal(flatten(closed), keep=())
    late = flatten(trace(backward_pass, leaves, tuple(cotangents))[0])
    runs_again = _is_cheap_for_its_size if is_selective else _is_cheap
    return _halve(early, late, len(outputs), inputs, runs_again)


def _halve(
    early: Graph,
    late: Graph,
    num_outputs: int,
    inputs: slice,
    runs_again: Callable[[Equation], bool],
) -> Halves:
    outvars, leaves = early.outvars[:num_outputs], early.outvars[num_outputs:]
    reads, cotangents = late.invars[: len(leaves)], late.invars[len(leaves) :]
    used = set(late.used_invars())
    leaves = tuple(a for a, v in zip(leaves, reads, strict=True) if v in used)
    reads = tuple(v for v in reads if v in used)

    kept = _choose(early, leaves, early.invars[inputs], runs_again)
    equations = Slicer(early).behind(leaves, stop=set(kept)).equations
    again = Graph((*early.invars, *kept), leaves, equations, early.consts)
    backward = Graph((*reads, *cotangents), late.outvars, late.equations, late.consts)
    forward = early.needed_for((*outvars, *kept))
    return Halves(kept, num_outputs, forward, again.needed_for(leaves), backward)


def _is_cheap(equation: Equation) -> bool:
    return equation.primitive.name in COMPUTED_AGAIN


def _is_matmul(equation: Equation) -> bool:
    return equation.primitive.name in MATMULS


def _is_cheap_for_its_size(equation: Equation) -> bool:
    if not _is_matmul(equation):
        return _is_cheap(equation)
    nbytes = sum(array_spec(v.aval).nbytes for v in equation.outvars)
    return equation_flops(equation) <= SELECTIVE_FLOPS_PER_BYTE * nbytes


def _choose(
    early: Graph,
    leaves: Sequence[Atom],
    inputs: Sequence[Var],
    runs_again: Callable[[Equation], bool],
) -> tuple[Var, ...]:
    """Values to save, in program order, from which cheap equations give `leaves`."""
    producer = {v: e for e in early.equations for v in e.outvars}
    varying = _depending_on(inputs, early.equations) & set(producer)

    parents: dict[Var, list[Var]] = {}
    sources = []
    targets = [v for v in dict.fromkeys(variables(leaves)) if v in varying]
    stack = list(targets)
    while stack:
        variable = stack.pop()
        if variable in parents:
            continue
        equation = producer[variable]
        parents[variable] = []
        if runs_again(equation):
            read = variables(equation.invars)
            parents[variable] = [v for v in read if v in varying]
            stack += parents[variable]
        else:
            sources.append(variable)
    weights = {v: array_spec(v.aval).nbytes for v in parents}
    cut = min_vertex_cut(weights, parents, sources, targets)
    return tuple(v for e in early.equations for v in e.outvars if v in cut)


def _depending_on(origins: Sequence[Var], equations: Sequence[Equation]) -> set[Var]:
    """`origins`, and every variable computed from one of them."""
    found = set(origins)
    for equation in equations:
        if not found.isdisjoint(variables(equation.invars)):
            found.update(equation.outvars)
    return found
