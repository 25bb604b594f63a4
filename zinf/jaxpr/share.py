"""Finds pieces of a program that are the same code, so that one executable serves all.

Two pieces are equal when their equations, read in order, are the same up to the names
of variables and the values of scalar literals. The literals in which equal pieces
differ (a dropout fold-in constant, a layer number) become arguments of the shared
body; all others stay constants, which XLA can fold.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.jaxpr.compat import (
    JAXPR_TYPES,
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    build_jaxpr,
    evaluate,
    fresh,
    is_function,
    open_jaxpr,
)


@dataclass(frozen=True)
class Piece:
    """Equations with inputs and outputs; `tags` must agree for pieces to be equal."""

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    tags: Hashable = None


@dataclass(frozen=True, eq=False)
class Body:
    """The code that equal pieces share; takes a piece's inputs, then the hoisted."""

    jaxpr: Jaxpr
    num_hoisted: int

    def __call__(self, *arguments: Any) -> list[Any]:
        return evaluate(self.jaxpr, arguments)


@dataclass(frozen=True)
class Shared:
    """A piece as a body and the values that it passes for the hoisted literals."""

    body: Body
    hoisted: tuple[Any, ...]


def share(pieces: Sequence[Piece]) -> list[Shared]:
    """One `Shared` a piece, in order; equal pieces hold the same `Body` object."""
    groups: dict[Hashable, list[int]] = {}
    literals = []
    for i, piece in enumerate(pieces):
        key, values = _signature(piece)
        groups.setdefault(key, []).append(i)
        literals.append(values)
    shared: dict[int, Shared] = {}
    for members in groups.values():
        columns = zip(*([_bits(v) for v in literals[i]] for i in members), strict=True)
        differing = [k for k, column in enumerate(columns) if len(set(column)) > 1]
        body = _hoist(pieces[members[0]], differing)
        for i in members:
            values = tuple(np.asarray(literals[i][k].val)[()] for k in differing)
            shared[i] = Shared(body, values)
    return [shared[i] for i in range(len(pieces))]


def _hoist(piece: Piece, positions: Sequence[int]) -> Body:
    wanted = set(positions)
    arguments: list[Var] = []
    equations, count = [], 0
    for equation in piece.equations:
        invars = []
        for atom in equation.invars:
            if isinstance(atom, Literal) and not atom.aval.shape:
                if count in wanted:
                    atom = fresh(atom.aval)
                    arguments.append(atom)
                count += 1
            invars.append(atom)
        equations.append(equation.replace(invars=invars))
    jaxpr = build_jaxpr((*piece.invars, *arguments), piece.outvars, equations)
    return Body(jaxpr, len(arguments))


def _signature(piece: Piece) -> tuple[Hashable, list[Literal]]:
    numbers: dict[Var, int] = {}
    literals: list[Literal] = []

    def atom_key(atom: Atom) -> Hashable:
        if not isinstance(atom, Literal):
            return numbers[atom]
        if not atom.aval.shape:
            literals.append(atom)
            return "scalar", _aval_key(atom.aval)
        return "array", _aval_key(atom.aval), np.asarray(atom.val).tobytes()

    def define(variables: Sequence[Var]) -> tuple:
        _number(numbers, variables)
        return tuple(_aval_key(v.aval) for v in variables)

    key: list[Hashable] = [define(piece.invars)]
    for equation in piece.equations:
        arguments = tuple(atom_key(a) for a in equation.invars)
        results = define(equation.outvars)
        key.append((equation_key(equation), arguments, results))
    # Outputs last: a literal output is a constant of the body, never hoisted.
    outputs = tuple(
        ("constant", _bits(a)) if isinstance(a, Literal) else numbers[a]
        for a in piece.outvars
    )
    return (tuple(key), outputs, piece.tags), literals


def _number(numbers: dict[Var, int], variables: Sequence[Var]) -> None:
    start = len(numbers)
    numbers.update((v, start + i) for i, v in enumerate(variables))


def equation_key(equation: Equation) -> Hashable:
    """What an equation does, apart from the variables that it reads and writes."""
    calls: list[Any] = []
    params = _param_key(equation.params, calls)
    rule = _derivative_key(equation) if calls else None
    return equation.primitive.name, params, rule


def _aval_key(aval: Any) -> Hashable:
    return aval.shape, str(aval.dtype), bool(getattr(aval, "weak_type", False))


def _bits(literal: Literal) -> Hashable:
    value = np.asarray(literal.val)
    return str(value.dtype), value.tobytes()


def _param_key(value: Any, calls: list[Any]) -> Hashable:
    """A hashable stand-in for an equation's parameter; functions go into `calls`."""
    if isinstance(value, JAXPR_TYPES):
        return _jaxpr_key(value, calls)
    if isinstance(value, dict):
        return tuple((k, _param_key(v, calls)) for k, v in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(_param_key(v, calls) for v in value)
    if isinstance(value, (np.ndarray, jax.Array)):
        return _array_key(value)
    if is_function(value):
        calls.append(value)
        return "function"
    return repr(value)


def _jaxpr_key(closed: Any, calls: list[Any]) -> Hashable:
    """What an inner jaxpr computes: its code, all its numbers, and its constants.

    Its printed form would not do: it leaves out the constants of jaxprs inside, and
    shows the addresses of functions, which differ between equal rules.
    """
    jaxpr, consts = open_jaxpr(closed)
    numbers: dict[Var, int] = {}

    def define(variables: Sequence[Var]) -> tuple:
        _number(numbers, variables)
        return tuple(str(v.aval) for v in variables)

    def atom_key(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return "literal", str(atom.aval), _bits(atom)
        return numbers[atom]

    key: list[Hashable] = [define(jaxpr.constvars), define(jaxpr.invars)]
    for equation in jaxpr.eqns:
        arguments = tuple(atom_key(a) for a in equation.invars)
        params = _param_key(equation.params, calls)
        name = equation.primitive.name
        key.append((name, params, arguments, define(equation.outvars)))
    outputs = tuple(atom_key(a) for a in jaxpr.outvars)
    return tuple(key), outputs, tuple(_array_key(c) for c in consts)


def _array_key(value: Any) -> Hashable:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return "extended", id(value)
    value = np.asarray(value)
    return value.shape, str(value.dtype), value.tobytes()


def _derivative_key(equation: Equation) -> Hashable:
    """Tells custom derivative rules apart by what they do.

    The rules of `custom_jvp` and `custom_vjp` are functions that jax wraps anew at each
    use, so their identity says nothing. Tracing the derivative of the one equation
    shows the rule as a jaxpr.
    """
    try:
        closed = jax.make_jaxpr(_derivative_of(equation))(
            *(a.aval for a in equation.invars)
        )
    except Exception:  # no derivative at all (a `while` with a custom rule inside)
        return id(equation)
    return _jaxpr_key(closed, [])


def _derivative_of(equation: Equation) -> Callable:
    inputs = [fresh(a.aval) for a in equation.invars]
    jaxpr = build_jaxpr(inputs, equation.outvars, [equation.replace(invars=inputs)])
    is_float = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in inputs]

    def derivative(*arguments: Any) -> Any:
        def of_floats(*floats: Any) -> list[Any]:
            values = iter(floats)
            mixed = [
                next(values) if f else x
                for f, x in zip(is_float, arguments, strict=True)
            ]
            outputs = evaluate(jaxpr, mixed)
            return [y for y in outputs if jnp.issubdtype(y.dtype, jnp.floating)]

        floats = [x for f, x in zip(is_float, arguments, strict=True) if f]
        outputs, vjp = jax.vjp(of_floats, *floats)
        return vjp([jnp.ones_like(y) for y in outputs])

    return derivative
