"""Fuses products into sums, as compilers do.

Which of two products LLVM fuses for XLA, and whether it fuses one that two sums read,
depends on the rest of the loop. Code that wants the bits of XLA has to try both.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from zinf_kernels.elementwise.program import Operation, Program

# The fused operation for a sum and the position of the product in it.
FUSED = {
    ("add", 0): "fused_add",
    ("add", 1): "fused_add",
    ("sub", 0): "fused_sub",
    ("sub", 1): "fused_from",
}


def contracted(program: Program, distance: Callable[[Program], int]) -> Program:
    """The program with products fused into sums such that `distance` is least.

    One sum after another is tried in all ways and keeps the best, so the time is linear
    in the number of sums. A product that no sum reads any more stays.

    Args:
        distance: of a program from the wanted bits; 0 ends the search.
    """
    ways = [_ways(program, operation) for operation in program.operations]
    best = replace(program, operations=tuple(first for first, *_ in ways))
    fewest, before = distance(best), -1
    while fewest not in (0, before):
        before = fewest
        for k, others in enumerate(ways):
            for other in others[1:]:
                operations = [*best.operations[:k], other, *best.operations[k + 1 :]]
                candidate = replace(program, operations=tuple(operations))
                if (found := distance(candidate)) < fewest:
                    best, fewest = candidate, found
    return best


def _ways(program: Program, operation: Operation) -> Sequence[Operation]:
    """The forms that an operation may be compiled to, likeliest first."""
    if operation.name not in ("add", "sub"):
        return [operation]
    uses = Counter(k for o in program.operations for k in o.operands)
    uses.update(value for _, value in program.outputs)
    once, often = [], []
    for place, value in enumerate(operation.operands):
        number = value - program.num_inputs
        if number < 0 or program.operations[number].name != "mul":
            continue
        factors = program.operations[number].operands
        name, term = FUSED[operation.name, place], operation.operands[1 - place]
        fused = Operation(name, (*factors, term))
        (once if uses[value] == 1 else often).append(fused)
    return [*once, *often] if once else [operation, *often]
