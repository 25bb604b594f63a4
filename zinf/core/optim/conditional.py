"""Splits a `cond` over many leaves, so that each output depends on its leaf alone.

Some transforms (`optax.conditionally_transform`, `optax.novograd`) put the update of
all leaves into the branches of one `cond`, which as one equation would couple them.
If the predicate reads no leaf, both branches are computed and each output is selected.
The results are the same; the cost is the branch that is not taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from zinf.core.jaxpr import Emitter, Graph, abstract, trace, variables
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, open_jaxpr
from zinf.core.jaxpr.walk import inner
from zinf.core.optim.coupling import dependencies


def split_conditionals(graph: Graph, leaf_bits: Mapping[Var, int]) -> Graph:
    """The graph without conds that read several leaves under a leaf-free predicate.

    Args:
        leaf_bits: the leaf (one bit) of each input that belongs to one.
    """
    found = dependencies(graph, leaf_bits)
    chosen = {n for n, e in enumerate(graph.equations) if _joins_leaves(e, found)}
    if not chosen:
        return graph
    emitter = Emitter()
    emitter.consts.update(graph.consts)
    for n, equation in enumerate(graph.equations):
        if n not in chosen:
            emitter.equations.append(equation)
            continue
        which, *operands = equation.invars
        branches = [emitter.call(x.program, operands) for x in inner(equation)]
        for out, *cases in zip(equation.outvars, *branches, strict=True):
            emitter.equations.append(_select(which, cases, out))
    equations = tuple(emitter.equations)
    graph = replace(graph, equations=equations, consts=emitter.consts)
    return split_conditionals(graph.needed_for(graph.outvars), leaf_bits)


def _joins_leaves(equation: Equation, found: Mapping[Var, int]) -> bool:
    if equation.primitive.name != "cond" or equation.effects:
        return False
    which, *operands = equation.invars
    bits = 0
    for variable in variables(operands):
        bits |= found.get(variable, 0)
    is_free = isinstance(which, Literal) or which not in found
    return is_free and bits.bit_count() > 1


def _select(which: Atom, cases: Sequence[Atom], out: Var) -> Equation:
    arguments = [which, *cases]
    closed, _ = trace(jax.lax.select_n, *(abstract(a.aval) for a in arguments))
    (equation,) = open_jaxpr(closed)[0].eqns
    return equation.replace(invars=arguments, outvars=[out])
