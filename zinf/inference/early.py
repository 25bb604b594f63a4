"""Outputs of a function that are changed as soon as each of them is computed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from zinf.core.jaxpr.compat import open_jaxpr
from zinf.core.jaxpr.walk import apply, with_dtype


def each_changed(function: Callable, arguments: Sequence[Any], changes: Any) -> Any:
    """The outputs of a function, each changed by a function of its own.

    A change follows the equation that computes its output, and not the last equation.
    So a program that is cut into segments does not hold the output until its end.

    Args:
        arguments: pytrees of arrays.
        changes: a function for each leaf of the result, in a pytree of its structure.
    """
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr, consts = open_jaxpr(closed)
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, jax.tree.leaves(arguments), strict=True))
    outputs: list[Any] = [None] * len(jaxpr.outvars)
    numbers: dict[Any, list[int]] = {}
    functions = jax.tree.leaves(changes)
    for number, out in enumerate(jaxpr.outvars):
        if isinstance(out, Literal) or out in known:
            value = with_dtype(out) if isinstance(out, Literal) else known[out]
            outputs[number] = functions[number](value)
        else:
            numbers.setdefault(out, []).append(number)
    for equation in jaxpr.eqns:
        given = [x if isinstance(x, Literal) else known[x] for x in equation.invars]
        known.update(zip(equation.outvars, apply(equation, given), strict=True))
        for out in equation.outvars:
            for number in numbers.get(out, ()):
                outputs[number] = functions[number](known[out])
    return jax.tree.unflatten(jax.tree.structure(result), outputs)
