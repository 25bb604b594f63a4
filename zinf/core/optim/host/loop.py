"""The update of a leaf as a program for `zinf_kernels.elementwise_update`.

The code that `compile_updates` gives to XLA is translated equation by equation. A
program with other operations (exponentials, integers, float64) has no loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zinf.core.jaxpr.compat import Atom, Equation, Literal, open_jaxpr
from zinf_kernels.arrays import BFLOAT16, FLOAT16, FLOAT32
from zinf_kernels.elementwise import Operation, Program

BOOL = np.dtype(np.bool_)
# XLA:CPU computes bfloat16 arithmetic in float32, without rounding in between.
NUMBERS = {FLOAT32, BFLOAT16}
ZERO, ONE = np.float32(0), np.float32(1)

# Primitives, and the operation of a program that each one equals.
OF_NUMBERS = {
    name: name
    for name in "add sub mul neg abs sqrt rsqrt sign max min gt ge lt le eq ne".split()
} | {"add_any": "add"}
OF_TRUTHS = {"and": "and_", "or": "or_", "not": "not_"}
IDENTITIES = {"broadcast_in_dim", "copy"}
LARGEST_POWER = 8


@dataclass(frozen=True)
class Loop:
    """A program, and the literals that it takes after the function's scalars."""

    program: Program
    literals: tuple[np.float32, ...]


def loop_of(
    function: Callable, arguments: Sequence[Any], *, num_read_only: int
) -> Loop | None:
    """The program of an element-wise function, or None if there is none.

    Args:
        function: gives new values of all its arrays but the first `num_read_only`, then
            those of further arrays.
        arguments: its arguments, abstract: scalars, then arrays of one shape.
    """
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(function)(*arguments))
    outputs = jaxpr.outvars
    scalars = [x for x in jaxpr.invars if not x.aval.shape]
    arrays = [x for x in jaxpr.invars if x.aval.shape]
    arrays += outputs[len(arrays) - num_read_only :]
    is_possible = (
        {_dtype(x) for x in scalars} <= NUMBERS | {BOOL}
        and {_dtype(x) for x in arrays} <= NUMBERS | {FLOAT16}
        and all(map(_has_counterpart, jaxpr.eqns))
    )
    if not is_possible or consts:
        return None
    translation = _Translation(jaxpr, num_arrays=len(arrays))
    for equation in jaxpr.eqns:
        translation.translate(equation)
    program = Program(
        arrays=tuple(map(_dtype, arrays)),
        num_scalars=translation.num_scalars,
        operations=tuple(translation.operations),
        outputs=tuple(enumerate(map(translation.number, outputs), num_read_only)),
    )
    return Loop(program, tuple(translation.literals))


def _has_counterpart(equation: Equation) -> bool:
    name = equation.primitive.name
    inputs = [_dtype(x) for x in equation.invars]
    outputs = {_dtype(x) for x in equation.outvars}
    if name == "select_n":
        return inputs[0] == BOOL and len(inputs) == 3 and set(inputs[1:]) <= NUMBERS
    if name in IDENTITIES:
        return set(inputs) <= NUMBERS | {BOOL}
    if name in OF_TRUTHS:
        return set(inputs) == {BOOL}
    if name == "convert_element_type":
        # Shorter floats are rounded where they are stored.
        return set(inputs) <= NUMBERS and outputs <= NUMBERS | {FLOAT16}
    if name == "integer_pow" and not 1 <= equation.params["y"] <= LARGEST_POWER:
        return False
    known = OF_NUMBERS.keys() | {"div", "integer_pow", "square", "clamp"}
    return name in known and set(inputs) <= NUMBERS and outputs <= NUMBERS | {BOOL}


class _Translation:
    """Numbers the values of a jaxpr, and makes operations of its equations."""

    def __init__(self, jaxpr: Any, num_arrays: int):
        scalars = [x for x in jaxpr.invars if not x.aval.shape]
        atoms = [x for e in jaxpr.eqns for x in e.invars] + jaxpr.outvars
        literals = {_bits(x): x for x in atoms if isinstance(x, Literal)}
        self.literals = [np.float32(x.val) for x in literals.values()] + [ZERO, ONE]
        self.num_scalars = len(scalars) + len(self.literals)
        self.first = num_arrays + self.num_scalars
        self.zero, self.one = self.first - 2, self.first - 1
        self.operations: list[Operation] = []
        arrays = [x for x in jaxpr.invars if x.aval.shape]
        self.numbers: dict[Any, int] = {x: k for k, x in enumerate(arrays)}
        self.numbers |= {x: k for k, x in enumerate([*scalars, *literals], num_arrays)}
        # Values that are the same for all elements.
        self.scalars = set(range(num_arrays, self.first))
        truths = [x for x in scalars if _dtype(x) == BOOL]
        truths += [key for key, x in literals.items() if _dtype(x) == BOOL]
        for truth in truths:
            self.numbers[truth] = self.emit("ne", self.numbers[truth], self.zero)

    def number(self, atom: Atom) -> int:
        return self.numbers[_bits(atom) if isinstance(atom, Literal) else atom]

    def translate(self, equation: Equation) -> None:
        operands = [self.number(x) for x in equation.invars]
        result = self._value(equation.primitive.name, operands, equation.params)
        (variable,) = equation.outvars
        self.numbers[variable] = result

    def emit(self, name: str, *operands: int) -> int:
        self.operations.append(Operation(name, operands))
        number = self.first + len(self.operations) - 1
        if self.scalars.issuperset(operands):
            self.scalars.add(number)
        return number

    def _value(self, name: str, operands: Sequence[int], params: Any) -> int:
        x, *rest = operands
        match name:
            case "broadcast_in_dim" | "copy" | "convert_element_type":
                return x
            case "select_n":
                otherwise, value = rest
                return self.emit("select", x, value, otherwise)
            case "clamp":
                value, largest = rest
                return self.emit("min", self.emit("max", x, value), largest)
            case "square":
                return self.emit("mul", x, x)
            case "integer_pow":
                return self._power(x, params["y"])
            case "div":
                return self._quotient(x, rest[0])
        return self.emit((OF_NUMBERS | OF_TRUTHS)[name], *operands)

    def _quotient(self, x: int, y: int) -> int:
        """x / y; by a scalar it multiplies with the inverse, as XLA does."""
        if y in self.scalars and x not in self.scalars:
            return self.emit("mul", x, self.emit("div", self.one, y))
        return self.emit("div", x, y)

    def _power(self, x: int, exponent: int) -> int:
        """x ** exponent by squaring, lowest bit first, as jax lowers it."""
        result = None
        while True:
            if exponent & 1:
                result = x if result is None else self.emit("mul", result, x)
            exponent >>= 1
            if not exponent:
                assert result is not None
                return result
            x = self.emit("mul", x, x)


def _bits(literal: Any) -> tuple[str, bytes]:
    value = np.asarray(literal.val, literal.aval.dtype)
    return str(value.dtype), value.tobytes()


def _dtype(atom: Atom) -> np.dtype:
    return np.dtype(atom.aval.dtype)
