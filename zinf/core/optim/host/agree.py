"""Compares a program with the executable that it may replace, on random numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from zinf.core.optim.separate import Separated
from zinf.core.optim.update import Unit, compile_updates
from zinf_kernels.elementwise import Program, elementwise_update
from zinf_kernels.elementwise.bounds import error_bounds
from zinf_kernels.elementwise.contract import contracted

# Enough numbers that a difference shows; compiling takes longer than running on them.
PROBE_NUMEL = 1000


@dataclass(frozen=True)
class Trial:
    """Inputs for a program, and the executable's outputs for them.

    Attributes:
        arrays: the program's arrays, which are not changed.
        expected: the new values of those that the program writes.
    """

    arrays: Sequence[np.ndarray]
    scalars: Sequence[np.float32]
    expected: Sequence[np.ndarray]

    def results(self, program: Program) -> list[np.ndarray]:
        """The program's outputs for these inputs.

        Runs the reference, not the loop: that needs no compiler, and it finds a term
        that was mistaken for another.
        """
        copies = [x.copy() for x in self.arrays]
        elementwise_update(program, copies, self.scalars, implementation="reference")
        return [copies[number] for number, _ in program.outputs]

    def num_different(self, program: Program) -> int:
        """The number of elements whose bits differ from those expected."""
        pairs = zip(self.results(program), self.expected, strict=True)
        return sum(int(np.sum(_bits(x) != _bits(y))) for x, y in pairs)

    def is_within_bounds(self, program: Program) -> bool:
        """Whether rounding explains all differences, and NaNs are where they were."""
        found = self.results(program)
        bounds = error_bounds(program, self.arrays, self.scalars)
        triples = zip(found, self.expected, bounds, strict=True)
        return all(_are_close(x, y, 2 * bound) for x, y, bound in triples)


def compile_probe(
    separated: Separated, unit: Unit, *, device: jax.Device
) -> Callable[..., list[np.ndarray]]:
    """A unit's update of `PROBE_NUMEL` elements, from and to NumPy arrays.

    It takes `(factor, step_values, gradient, master, *states)`, as `UpdateStep` does.
    """
    unit = replace(unit, shape=(PROBE_NUMEL,))
    (step,) = compile_updates(separated, [unit], device=device).steps

    def execute(
        factor: np.float32, step_values: Sequence[Any], *arrays: np.ndarray
    ) -> list[np.ndarray]:
        # Copies, because the CPU backend would alias NumPy memory that changes later.
        placed = jax.device_put([x.copy() for x in arrays], device)
        return [np.asarray(x) for x in step(factor, step_values, *placed)]

    return execute


def closest(program: Program, trials: Sequence[Trial]) -> Program:
    """The contraction of a program that gives the most expected bits."""
    return contracted(
        program, lambda candidate: sum(t.num_different(candidate) for t in trials)
    )


def _are_close(x: np.ndarray, y: np.ndarray, bound: np.ndarray) -> bool:
    x, y = _wide(x), _wide(y)
    with np.errstate(invalid="ignore"):
        # Not greater, for a difference of infinities or a bound that is NaN.
        is_close = not np.any(np.abs(x - y) > bound)
    return is_close and np.array_equal(np.isnan(x), np.isnan(y))


def _bits(array: np.ndarray) -> Any:
    """Bits of the elements; all NaNs are equal, because no payload is used."""
    bits = array.view(f"u{array.itemsize}")
    return np.where(np.isnan(_wide(array)), np.iinfo(bits.dtype).max, bits)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)
