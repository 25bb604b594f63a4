"""Executables that sum gradients over devices, where each device has a part."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.plan import PartSum
from zinf.core.problem.problem import Problem
from zinf.core.program import ArrayId, Program, Role
from zinf.core.segment.executables import temporary_bytes
from zinf.core.sharding import AbstractParts, Layout, Layouts
from zinf.core.step.exchange import exchange_of
from zinf.core.step.sums import sum_dtype
from zinf.core.topology import collectives_of, compile_for


@dataclass(frozen=True)
class PartSums:
    """The sums over devices of all gradients that are parts.

    Attributes:
        steps: `(parts, errors) -> gradient, new errors` by the array that is written:
            the gradient, or one contribution to it if several segments read the
            parameter.
        costs: what each needs, by gradient.
    """

    steps: Mapping[ArrayId, Any]
    costs: Mapping[ArrayId, PartSum]

    def __call__(
        self, target: ArrayId, parts: jax.Array, errors: Sequence[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        return self.steps[target](parts, errors)


def compile_part_sums(
    program: Program,
    problem: Problem,
    *,
    accumulates: Collection[ArrayId],
    layouts: Layouts,
) -> PartSums:
    """Compiles the sums of a program; equal ones share an executable.

    Args:
        accumulates: parameter arrays whose gradient is a sum of several contributions.
    """
    compiled: dict[Any, Any] = {}
    costs: dict[Any, PartSum] = {}
    steps: dict[ArrayId, Any] = {}
    by_gradient = {}
    for segment in program.segments:
        for array in segment.in_parts:
            narrow = jnp.dtype(problem.params[array.path].compute.dtype)
            wide = sum_dtype(narrow) if array in accumulates else narrow
            parts = layouts.parts_of(array)
            assert parts is not None, array
            for role, dtype in ((Role.GRADIENT, wide), (Role.GRADIENT_PART, narrow)):
                key = parts, wide, dtype
                if key not in compiled:
                    compiled[key] = _compile(parts, wide, dtype)
                    sent = exchange_of(collectives_of(compiled[key]))
                    costs[key] = PartSum(temporary_bytes(compiled[key]), sent)
                steps[array.of_role(role)] = compiled[key]
            errors = tuple(
                ArrayId(Role.ERROR, array.path, array.rows, slot=slot)
                for slot in range(len(parts.errors))
            )
            needed = replace(costs[parts, wide, wide], errors=errors)
            by_gradient[array.of_role(Role.GRADIENT)] = needed
    return PartSums(steps, by_gradient)


def _compile(parts: AbstractParts, dtype: Any, total_dtype: Any) -> Any:
    def placed(layout: Layout, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(layout.padded, dtype, sharding=layout.device)

    errors = [placed(layout, parts.error_dtype) for layout in parts.errors]
    results = parts.total.device, [layout.device for layout in parts.errors]

    def run(own: Any, errors: Any) -> tuple[Any, list[Any]]:
        total, new, _ = parts.exchange(own, errors, total_dtype)
        return total, new

    jitted = jax.jit(run, out_shardings=results, donate_argnums=1)
    given = placed(parts.layout, dtype), errors
    return compile_for(parts.mesh, jitted.lower(*given))
