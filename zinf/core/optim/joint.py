"""Several updates as one executable, computed in place.

One call for each array of a layer costs 0.3 ms on a CPU, even for a vector of a few
hundred numbers, and memory for results besides the arrays that they replace. Where
arrays rest on the devices, one call updates several, in the memory of the arrays.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from zinf.core.optim.update import Compile, UpdateStep


@dataclass(frozen=True)
class JointStep:
    """The updates of several units.

    `workspace_bytes` is what a call allocates on each device if no result can reuse the
    memory of an argument: XLA does not write into memory that it did not allocate.
    """

    executable: jax.stages.Compiled
    step_values: tuple[int, ...]
    hoisted: tuple[Any, ...]
    workspace_bytes: int

    def __call__(
        self,
        factor: Any,
        step_values: Sequence[Any],
        grads: Sequence[Any],
        arrays: Sequence[Sequence[Any]],
    ) -> list[tuple[jax.Array, ...]]:
        """For each unit the results of its `UpdateStep`, bit-equal.

        Args:
            factor: float32 scalar that gradients are multiplied by.
            step_values: all those of this step (see `compile_advance`).
            arrays: the master and the states of each unit; they are donated.
        """
        mine = [step_values[k] for k in self.step_values]
        return self.executable(factor, mine, self.hoisted, list(grads), list(arrays))


class JointCompiler:
    """Compiles updates together; groups with equal code share an executable."""

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def __call__(self, steps: Sequence[UpdateStep]) -> JointStep:
        """The updates of `steps`, all element-wise: sums could round differently."""
        assert all(step.is_elementwise for step in steps)
        values = tuple(sorted({k for step in steps for k in step.step_values}))
        taken = [tuple(map(values.index, step.step_values)) for step in steps]
        key = tuple((step.code, k) for step, k in zip(steps, taken, strict=True))
        if key not in self._compiled:
            self._compiled[key] = self._compile(_lowered(steps, values, taken))
        executable = self._compiled[key]
        memory: Any = executable.memory_analysis()
        nbytes = memory.output_size_in_bytes + memory.temp_size_in_bytes
        hoisted = tuple(step.hoisted for step in steps)
        return JointStep(executable, values, hoisted, nbytes)


def _lowered(
    steps: Sequence[UpdateStep], values: Sequence[int], taken: Sequence[Sequence[int]]
) -> jax.stages.Lowered:
    functions = [step.code.function for step in steps]

    def joint(
        factor: Any, step_values: Any, hoisted: Any, grads: Any, arrays: Any
    ) -> list[tuple[jax.Array, ...]]:
        results = []
        for function, numbers, literals, grad, (master, *states) in zip(
            functions, taken, hoisted, grads, arrays, strict=True
        ):
            mine = [step_values[k] for k in numbers]
            # Without the barrier, XLA divides differently by a scalar that several
            # arrays share. For several devices it merges barriers of the same operands:
            # the gradient makes each its own.
            *own, grad = jax.lax.optimization_barrier((factor, mine, literals, grad))
            results.append(function(*own, grad, master, states))
        return results

    specs: dict[int, Any] = {}
    rows, places = [], []
    for step in steps:
        factor, own, literals, grad, master, states = step.code.arguments
        specs.update(zip(step.step_values, own, strict=True))
        rows.append((literals, grad, [master, *states]))
        scalar, _, _, *here = step.code.shardings
        places.append((scalar, here[0], [here[1], *here[2]]))
    hoisted, grads, arrays = (list(column) for column in zip(*rows, strict=True))
    scalars, *forms = (list(column) for column in zip(*places, strict=True))
    jitted = jax.jit(
        joint,
        in_shardings=(scalars[0], scalars[0], scalars[0], *forms),
        out_shardings=[step.code.result_shardings for step in steps],
        donate_argnums=4,
    )
    return jitted.lower(
        factor, [specs[k] for k in values], tuple(hoisted), grads, arrays
    )
