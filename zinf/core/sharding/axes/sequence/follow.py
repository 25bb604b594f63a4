"""Follows dims leniently through equations: which dim of a result holds what.

Marks decide shardings only. A wrong guess costs bytes between devices and never changes
a number, so dims are guessed where the rules of `core.jaxpr.dims` refuse.
"""

from collections.abc import Mapping
from enum import StrEnum

from zinf.core.jaxpr.compat import Equation, Literal, Var
from zinf.core.jaxpr.dims import guessed_dim


class Mark(StrEnum):
    """What a dim of a value holds."""

    EXAMPLES = "examples"
    POSITIONS = "positions"
    MERGED = "merged"  # Examples and positions, reshaped into one dim.
    HEADS = "heads"  # Of the scores of an attention, and of what is computed from them.
    FIRST = "first"  # Positions of the first operand of the scores.
    SECOND = "second"  # Positions of the second operand.


Marks = dict[Mark, int]
"""The marked dims of one value."""


def results(equation: Equation, known: Mapping[Var, Marks]) -> Marks:
    """The marks of an equation's results, from those of its operands."""
    operands = [
        {} if isinstance(a, Literal) else known.get(a, {}) for a in equation.invars
    ]
    found: Marks = {}
    for mark in Mark:
        own = {n: marks[mark] for n, marks in enumerate(operands) if mark in marks}
        dim = guessed_dim(equation, own) if own else None
        if dim is not None:
            found[mark] = dim
    if equation.primitive.name == "reshape":
        _merge_or_split(equation, operands[0], found)
    return found


def _merge_or_split(equation: Equation, before: Marks, after: Marks) -> None:
    """Adds the marks of (examples, positions) merged into one dim, or split again."""
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    examples, positions = before.get(Mark.EXAMPLES), before.get(Mark.POSITIONS)
    if examples is not None and positions == examples + 1:
        rows = old[examples] * old[positions]
        if new[: examples + 1] == (*old[:examples], rows):
            after.pop(Mark.EXAMPLES, None)
            after.pop(Mark.POSITIONS, None)
            after[Mark.MERGED] = examples
    merged = before.get(Mark.MERGED)
    if merged is not None and new[: merged + 1] != old[: merged + 1]:
        after.pop(Mark.MERGED, None)
        if len(new) > merged + 1 and new[merged] * new[merged + 1] == old[merged]:
            after |= {Mark.EXAMPLES: merged, Mark.POSITIONS: merged + 1}
