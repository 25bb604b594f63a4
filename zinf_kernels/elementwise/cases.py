"""Named programs for tests and benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zinf_kernels.arrays import BFLOAT16, FLOAT16, FLOAT32
from zinf_kernels.elementwise.program import ARITIES, Operation, Program

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")


@dataclass(frozen=True)
class Case:
    """A program and its scalars; `make` makes its arrays."""

    name: str
    program: Program
    scalars: tuple[np.float32, ...] = ()

    def make(self, numel: int, *, seed: int = 0) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        return [
            random.standard_normal(numel).astype(np.float32).astype(dtype)
            for dtype in self.program.arrays
        ]


def cases() -> Iterator[Case]:
    """Every operation alone, every dtype, and one optimizer."""
    for name, arity in ARITIES.items():
        if name not in (*COMPARISONS, "and_", "or_", "not_", "select"):
            operation = Operation(name, tuple(range(arity)))
            yield Case(name, _program([FLOAT32] * 3, 0, operation))
    # The first number if the comparison holds, else the second.
    for name in COMPARISONS:
        operations = Operation(name, (0, 1)), Operation("select", (3, 0, 1))
        yield Case(name, _program([FLOAT32] * 3, 0, *operations))
    yield Case("truths", _program([FLOAT32] * 3, 0, *TRUTHS))
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        half = _program([dtype] * 2, 1, Operation("mul", (0, 2)))
        yield Case(f"half_{dtype}", half, (np.float32(0.5),))
    yield lion()


def lion() -> Case:
    """Lion (Chen et al. 2023) with a gradient and a compute copy in bfloat16."""
    operations = (
        Operation("mul", (4, 2)),
        Operation("fused_add", (5, 0, 9)),
        Operation("sign", (10,)),
        Operation("fused_add", (6, 11, 1)),
        Operation("mul", (7, 2)),
        Operation("fused_add", (8, 0, 13)),
    )
    arrays = BFLOAT16, FLOAT32, FLOAT32, BFLOAT16
    program = Program(arrays, 5, operations, ((1, 12), (2, 14), (3, 12)))
    numbers = (0.9, 0.1, -1e-3, 0.99, 0.01)
    return Case("lion", program, tuple(map(np.float32, numbers)))


# a > b and not (b > c or a == c).
TRUTHS = (
    Operation("gt", (0, 1)),
    Operation("gt", (1, 2)),
    Operation("eq", (0, 2)),
    Operation("or_", (4, 5)),
    Operation("not_", (6,)),
    Operation("and_", (3, 7)),
    Operation("select", (8, 0, 1)),
)


def _program(
    arrays: list[np.dtype], num_scalars: int, *operations: Operation
) -> Program:
    """A program that writes its last value over its last array."""
    last = len(arrays) + num_scalars + len(operations) - 1
    return Program(tuple(arrays), num_scalars, operations, ((len(arrays) - 1, last),))
