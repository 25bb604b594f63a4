"""Finds element-wise updates, and rewrites them for a block of rows.

An element-wise update may run on any block of a leaf with the result of the whole. A
block's code is the leaf's with other shapes: no trace of the transform at the block's
shape is needed, so a rule that asks for the shape of a parameter (decay matrices only,
factor large leaves) decides on the leaf and never on the block.
"""

from dataclasses import replace
from typing import TypeVar

from zinf.core.jaxpr import Graph, Piece, variables
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, fresh
from zinf.core.jaxpr.primitives import ELEMENTWISE

Program = TypeVar("Program", Piece, Graph)


def is_elementwise(
    program: Piece | Graph, *, shape: tuple[int, ...], num_arrays: int
) -> bool:
    """Whether a program acts on each entry of arrays of one shape alone.

    Args:
        shape: that of the leaf; its first `num_arrays` inputs are arrays of it (grad,
            parameter, state) and all further inputs must be scalars.
    """
    arrays, scalars = program.invars[:num_arrays], program.invars[num_arrays:]
    outputs = [_shape(a) for a in program.outvars]
    return (
        all(_shape(v) == shape for v in arrays)
        and all(_shape(v) == () for v in scalars)
        and all(s in (shape, ()) for s in outputs)
        and all(_acts_elementwise(e, shape) for e in program.equations)
        and not _reads_constants(program)
    )


def at_shape(
    program: Program, *, shape: tuple[int, ...], block: tuple[int, ...]
) -> Program:
    """An element-wise program over arrays of `shape`, for arrays of shape `block`."""
    if shape == block:
        return program
    resized: dict[Var, Var] = {}

    def resize(atom: Atom) -> Atom:
        if _shape(atom) != shape:
            return atom
        if atom not in resized:
            resized[atom] = fresh(atom.aval.update(shape=block))
        return resized[atom]

    def resize_all(atoms: tuple[Atom, ...]) -> list[Atom]:
        return [resize(a) for a in atoms]

    equations = []
    for equation in program.equations:
        params = equation.params
        if equation.primitive.name == "broadcast_in_dim":
            params = {**params, "shape": block}
        invars, outvars = resize_all(equation.invars), resize_all(equation.outvars)
        equations.append(
            equation.replace(invars=invars, outvars=outvars, params=params)
        )
    invars, outvars = resize_all(program.invars), resize_all(program.outvars)
    return replace(
        program,
        invars=tuple(invars),
        outvars=tuple(outvars),
        equations=tuple(equations),
    )


def _acts_elementwise(equation: Equation, shape: tuple[int, ...]) -> bool:
    inputs = [_shape(a) for a in equation.invars]
    outputs = [_shape(v) for v in equation.outvars]
    if equation.primitive.name == "broadcast_in_dim":
        return inputs == [()] and outputs == [shape]
    has_array_literal = any(
        isinstance(a, Literal) and _shape(a) != () for a in equation.invars
    )
    return (
        (equation.primitive.name in ELEMENTWISE or _is_bits(equation))
        and not equation.effects
        and not has_array_literal
        and all(s in (shape, ()) for s in (*inputs, *outputs))
    )


def _is_bits(equation: Equation) -> bool:
    """Whether an equation reinterprets bits; another width would add a dim."""
    return equation.primitive.name == "bitcast_convert_type"


def _reads_constants(program: Piece | Graph) -> bool:
    """Whether a program reads arrays that are not inputs; these are not cut."""
    known = set(program.invars)
    for equation in program.equations:
        if not known.issuperset(variables(equation.invars)):
            return True
        known.update(equation.outvars)
    return not known.issuperset(variables(program.outvars))


def _shape(atom: Atom) -> tuple[int, ...]:
    return atom.aval.shape
