"""The computation of a loop for each element, as a list of operations.

    Program(
        arrays=(FLOAT32, FLOAT32),             # values 0 and 1
        num_scalars=1,                         # value 2
        operations=(Operation("mul", (2, 0)),  # value 3
                    Operation("add", (1, 3))), # value 4
        outputs=((1, 4),),
    )

adds to array 1 a multiple of array 0. All constants are scalars, so that loops that
differ only in constants are one loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# How many operands each operation has. All are float32 except the results of
# comparisons, `and_`, `or_` and `not_`, and the first operand of `select`, which are
# boolean.
ARITIES = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    # x * y + z, x * y - z and z - x * y, rounded once.
    "fused_add": 3,
    "fused_sub": 3,
    "fused_from": 3,
    "neg": 1,
    "abs": 1,
    "sqrt": 1,
    "rsqrt": 1,
    # Zeros and NaNs are returned as they are.
    "sign": 1,
    # NaN if one operand is.
    "max": 2,
    "min": 2,
    "gt": 2,
    "ge": 2,
    "lt": 2,
    "le": 2,
    "eq": 2,
    "ne": 2,
    "and_": 2,
    "or_": 2,
    "not_": 1,
    # A boolean, the value if it is true, and the value otherwise.
    "select": 3,
}


@dataclass(frozen=True)
class Operation:
    """One of `ARITIES`, on earlier values."""

    name: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Operations on the elements i of some arrays and on scalars, for every i.

    Values are numbered: elements of the arrays, then scalars, then results.

    Attributes:
        arrays: the dtypes of all arrays. Elements are widened to float32.
        outputs: pairs of an array's number and the value that replaces its element,
            rounded to nearest, ties to even.
    """

    arrays: tuple[np.dtype, ...]
    num_scalars: int
    operations: tuple[Operation, ...]
    outputs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for number, operation in enumerate(self.operations, self.num_inputs):
            assert len(operation.operands) == ARITIES[operation.name]
            assert all(0 <= k < number for k in operation.operands)

    @property
    def num_inputs(self) -> int:
        """The number of values before the results of operations."""
        return len(self.arrays) + self.num_scalars

    def evaluate(
        self, meaning: Mapping[str, Callable[..., Any]], inputs: Sequence[Any]
    ) -> list[Any]:
        """All values of the program, given a function for each operation's name.

        Args:
            inputs: the elements and scalars.
        """
        values = list(inputs)
        for operation in self.operations:
            operands = [values[k] for k in operation.operands]
            values.append(meaning[operation.name](*operands))
        return values
