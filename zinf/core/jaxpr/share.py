"""Finds pieces of a program with the same code, so that they share one executable.

Two pieces are equal when their equations, read in order, are the same up to the names
of variables and the values of scalar literals. The literals in which equal pieces
differ (a dropout fold-in constant, a layer number) become arguments of the shared
body; all others stay constants, which XLA can fold.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.compat import (
    JAXPR_TYPES,
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    build_jaxpr,
    evaluate,
    fresh,
    inner_jaxpr,
    is_function,
)
from zinf.core.jaxpr.emit import abstract, trace
from zinf.core.jaxpr.primitives import FLAT
from zinf.core.jaxpr.walk import CUSTOM, REMAT


@dataclass(frozen=True)
class Piece:
    """A part of a program: equations with inputs and outputs.

    Attributes:
        tags: pieces are equal only if their tags are.
        differentiated: the inputs with respect to which the piece is differentiated
            later. Custom derivative rules are compared for these inputs only.
    """

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    tags: Hashable = None
    differentiated: frozenset[Var] = frozenset()


@dataclass(frozen=True, eq=False)
class Body:
    """The code of equal pieces; takes a piece's inputs, then the hoisted literals."""

    jaxpr: Jaxpr
    num_hoisted: int

    def __call__(self, *arguments: Any) -> list[Any]:
        return evaluate(self.jaxpr, arguments)


@dataclass(frozen=True)
class Shared:
    """The body of a piece, and its values for the hoisted literals."""

    body: Body
    hoisted: tuple[Any, ...]


def share(pieces: Sequence[Piece]) -> list[Shared]:
    """One `Shared` for each piece, in order; equal pieces have one `Body` object."""
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
    with_tangent = set(piece.differentiated)
    for equation in piece.equations:
        arguments = tuple(atom_key(a) for a in equation.invars)
        results = define(equation.outvars)
        perturbed = tuple(
            not isinstance(a, Literal) and a in with_tangent for a in equation.invars
        )
        if any(perturbed):
            with_tangent.update(_outputs_with_tangent(equation))
        calls: list[Any] = []
        params = _params_key(equation, calls)
        rule = _derivative_key(equation, perturbed) if calls else None
        key.append((equation.primitive.name, params, rule, arguments, results))
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
    """A key of the function that an equation computes, without its variables.

    Custom derivative rules are not part of the key.
    """
    return equation.primitive.name, _params_key(equation, [])


def calls_rule(
    equation: Equation, function: Callable, perturbed: Sequence[bool]
) -> bool:
    """Whether an equation calls `function`, or one with its results and derivative.

    Args:
        function: with `jax.custom_jvp` or `jax.custom_vjp`.
        perturbed: for each input, whether it has a tangent; see `_derivative_key`.
    """
    if equation.primitive.name not in CUSTOM or len(equation.invars) != len(perturbed):
        return False
    arguments = (abstract(a.aval) for a in equation.invars)
    jaxpr, _ = inner_jaxpr(trace(function, *arguments)[0])
    if [e.primitive.name for e in jaxpr.eqns] != [equation.primitive.name]:
        return False
    (own,) = jaxpr.eqns
    return equation_key(own) == equation_key(equation) and (
        _derivative_key(own, perturbed) == _derivative_key(equation, perturbed)
    )


# NumPy makes a dtype's name anew each time; 70B parameters ask for 150,000.
_name = cache(str)


def _aval_key(aval: Any) -> Hashable:
    return aval.shape, _name(aval.dtype), bool(getattr(aval, "weak_type", False))


def _bits(literal: Literal) -> Hashable:
    value = np.asarray(literal.val)
    return _name(value.dtype), value.tobytes()


def _params_key(equation: Equation, calls: list[Any]) -> Hashable:
    """A hashable key of an equation's parameters.

    Rules of derivatives are added to `calls`: `_derivative_key` compares what they
    compute. All other code is compared by identity, since two functions with one name
    may do different things (the callback of each layer, for example). The policy of a
    `jax.checkpoint` chooses what is recomputed and changes no value.
    """
    name = equation.primitive.name

    def code_key(function: Any) -> Hashable:
        if name in CUSTOM:
            calls.append(function)
            return "rule"
        return "policy" if name in REMAT else _code_key(function)

    return _param_key(equation.params, calls, code_key)


def _param_key(
    value: Any, calls: list[Any], code_key: Callable[[Any], Hashable]
) -> Hashable:
    if isinstance(value, JAXPR_TYPES):
        return _jaxpr_key(value, calls)
    if isinstance(value, dict):
        items = sorted(value.items())
        return tuple((k, _param_key(v, calls, code_key)) for k, v in items)
    if isinstance(value, (tuple, list)):
        return tuple(_param_key(v, calls, code_key) for v in value)
    if isinstance(value, (np.ndarray, jax.Array)):
        return _array_key(value)
    if is_function(value):
        return code_key(value)
    return repr(value)


def _code_key(function: Any) -> Hashable:
    """A key by identity, which holds the function, so that its id is not used again.

    jax wraps what a user gives to `jax.debug.callback` in a new closure at each call:
    the key of such a wrapper has its code and what it holds.
    """
    if not isinstance(function, Hashable):
        return _Same(function)
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, FunctionType) and module.partition(".")[0] == "jax":
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return function.__code__, tuple(map(_held_key, cells))
    # A wrapper of `jax.pure_callback` is equal to others of the same function.
    return function


def _held_key(value: Any) -> Hashable:
    """The key of a value in a closure cell of jax's wrapper: a function or data."""
    if is_function(value):
        return _code_key(value)
    if isinstance(value, dict):
        return tuple((name, _held_key(x)) for name, x in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_held_key, value))
    is_plain = isinstance(value, (jax.tree_util.PyTreeDef, str, int, bool, type(None)))
    return value if is_plain else _Same(value)


class _Same:
    """A key by identity: equal only to a key of the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _jaxpr_key(inner: Any, calls: list[Any]) -> Hashable:
    """A key of an inner jaxpr: its code, all literals, and its constants.

    The printed jaxpr is not enough: it omits the constants of nested jaxprs, and shows
    the addresses of functions, which differ between equal rules.
    """
    jaxpr, consts = inner_jaxpr(inner)
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
        params = _params_key(equation, calls)
        name = equation.primitive.name
        key.append((name, params, arguments, define(equation.outvars)))
    outputs = tuple(atom_key(a) for a in jaxpr.outvars)
    return tuple(key), outputs, tuple(_array_key(c) for c in consts)


def _array_key(value: Any) -> Hashable:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return "extended", id(value)
    value = np.asarray(value)
    return value.shape, _name(value.dtype), value.tobytes()


def _outputs_with_tangent(equation: Equation) -> list[Var]:
    """The outputs that jax gives a tangent when some input has one.

    This may include outputs that get no tangent in jax: those of a call that ignores
    its input. A rule may then be traced for an input that never has a tangent.
    """
    if equation.primitive.name in FLAT:
        return []
    return [v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]


def _derivative_key(equation: Equation, perturbed: Sequence[bool]) -> Hashable:
    """A key of what the custom derivative rule computes; None if it is not used.

    jax wraps the rules of `custom_jvp` and `custom_vjp` anew at each use, so their
    identity does not show which are equal. Tracing the derivative of the equation gives
    the rule as a jaxpr.

    Args:
        perturbed: for each input, whether it has a tangent. The trace must ask the rule
            for exactly these. A rule may refuse others, and jax has one store of output
            structures for all traces of a rule: a trace that fails empties the store,
            and a later derivative of the same equation then fails with "Store empty".
    """
    if not any(perturbed):
        return None
    try:
        closed = jax.make_jaxpr(_derivative_of(equation, perturbed))(
            *(a.aval for a in equation.invars)
        )
    except Exception:  # No derivative exists (a `while` with a custom rule inside).
        return id(equation)
    return _jaxpr_key(closed, [])


def _derivative_of(equation: Equation, perturbed: Sequence[bool]) -> Callable:
    inputs = [fresh(a.aval) for a in equation.invars]
    jaxpr = build_jaxpr(inputs, equation.outvars, [equation.replace(invars=inputs)])

    def derivative(*arguments: Any) -> Any:
        def of_perturbed(*chosen: Any) -> list[Any]:
            values = iter(chosen)
            mixed = [
                next(values) if p else x
                for p, x in zip(perturbed, arguments, strict=True)
            ]
            outputs = evaluate(jaxpr, mixed)
            return [y for y in outputs if jnp.issubdtype(y.dtype, jnp.inexact)]

        chosen = [x for p, x in zip(perturbed, arguments, strict=True) if p]
        outputs, vjp = jax.vjp(of_perturbed, *chosen)
        return vjp([jnp.ones_like(y) for y in outputs])

    return derivative
