"""Writes a flat program: equations one after another, calls inlined."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, fresh, open_jaxpr
from zinf.core.jaxpr.walk import CALLS, inner


class Emitter:
    """Collects the equations of a flat program.

    Attributes:
        equations: the equations written so far; their output variables are fresh.
        consts: the constants of inlined jaxprs, by variable.
        inlines: the names of the calls that are inlined.
    """

    inlines = CALLS

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.consts: dict[Var, Any] = {}

    def append(self, equation: Equation) -> list[Atom]:
        """Writes an equation whose inputs are atoms of this program."""
        outvars = [fresh(v.aval) for v in equation.outvars]
        self.equations.append(equation.replace(outvars=outvars))
        return outvars

    def emit(self, equation: Equation, arguments: list[Atom]) -> list[Atom]:
        """Writes an equation of another program, on atoms of this one."""
        if equation.primitive.name in self.inlines:
            (inside,) = inner(equation)
            return self.call(inside.program, arguments)
        return self.append(equation.replace(invars=arguments))

    def inline(self, jaxpr: Any, env: dict[Var, Atom]) -> list[Atom]:
        """Writes the equations of `jaxpr`; returns its outputs, as atoms written here.

        Args:
            env: the atoms of this program for the variables of `jaxpr`. It has the
                inputs; this call adds the variables that the equations define.
        """
        for equation in jaxpr.eqns:
            results = self.emit(equation, renamed(equation.invars, env))
            env.update(zip(equation.outvars, results, strict=True))
        return renamed(jaxpr.outvars, env)

    def call(self, closed: Any, arguments: Sequence[Atom]) -> list[Atom]:
        """Inlines a closed jaxpr and its constants."""
        jaxpr, values = open_jaxpr(closed)
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, value in zip(jaxpr.constvars, values, strict=True):
            env[variable] = fresh(variable.aval)
            self.consts[env[variable]] = value
        return self.inline(jaxpr, env)

    def apply(self, function: Callable, *atoms: Atom) -> list[Atom]:
        """Traces a jax function and inlines it on these atoms."""
        closed, _ = trace(function, *(abstract(a.aval) for a in atoms))
        return self.call(closed, atoms)


def renamed(atoms: Sequence[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    """The atoms, with each variable in `names` replaced by its atom there."""
    return [a if isinstance(a, Literal) else names.get(a, a) for a in atoms]


def abstract(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def trace(function: Callable, *arguments: Any) -> tuple[Any, Any]:
    """`(closed jaxpr, output structure)` of a function on abstract arguments."""
    return jax.make_jaxpr(function, return_shape=True)(*arguments)
