"""Which outputs of a program are its inputs, unchanged."""

from typing import Any

from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, scan_arity
from zinf.core.jaxpr.graph import inline_all


def passed(closed: Any) -> list[int | None]:
    """For each output of a closed jaxpr, the number of the input that it is, or None.

    An input is followed through calls, `jax.checkpoint`, branches that all return it,
    and loops that carry or stack it unchanged.
    """
    graph = inline_all(closed)
    producers = {v: e for e in graph.equations for v in e.outvars}
    numbers = {v: n for n, v in enumerate(graph.invars)}
    return [_number(atom, numbers, producers) for atom in graph.outvars]


def _number(
    atom: Atom, numbers: dict[Var, int], producers: dict[Var, Equation]
) -> int | None:
    while not isinstance(atom, Literal) and atom not in numbers:
        equation = producers.get(atom)
        operand = None if equation is None else _operand(equation, atom)
        if operand is None:
            return None
        atom = operand
    return None if isinstance(atom, Literal) else numbers[atom]


def _operand(equation: Equation, outvar: Var) -> Atom | None:
    """The operand that an output of `scan`, `while` or `cond` is."""
    place, params = list(equation.outvars).index(outvar), equation.params
    match equation.primitive.name:
        case "scan":
            num_consts, num_carry = scan_arity(equation)
            number = passed(params["jaxpr"])[place]
            if place < num_carry:  # The same in each iteration if it is its own input.
                is_same = number == num_consts + place
            else:
                is_same = number is not None and number >= num_consts + num_carry
        case "while":
            num_body = params["body_nconsts"]
            number = num_body + place
            is_same = passed(params["body_jaxpr"])[place] == number
            number += params["cond_nconsts"]
        case "cond":
            each = {passed(branch)[place] for branch in params["branches"]}
            number = None if len(each) > 1 else each.pop()
            is_same = number is not None
            number = None if number is None else number + 1  # The index comes first.
        case _:
            return None
    return equation.invars[number] if is_same and number is not None else None
