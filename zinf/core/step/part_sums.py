"""Executables that sum gradients over devices, where each device has a part."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.plan import Exchange
from zinf.core.problem.problem import Problem
from zinf.core.program import ArrayId, Program, Role
from zinf.core.segment.executables import temporary_bytes
from zinf.core.sharding import Layouts, Parts
from zinf.core.step.exchange import exchange_of
from zinf.core.step.sums import sum_dtype
from zinf.core.topology import collectives_of, compile_for


@dataclass(frozen=True)
class PartSums:
    """The sums over devices of all gradients that are parts.

    Attributes:
        steps: `parts -> gradient` by the array that is written: the gradient, or one
            contribution to it if several segments read the parameter.
        costs: device bytes beside arguments and results, and bytes that are sent, by
            gradient.
    """

    steps: Mapping[ArrayId, Any]
    costs: Mapping[ArrayId, tuple[int, Exchange]]

    def __call__(self, target: ArrayId, parts: jax.Array) -> jax.Array:
        return self.steps[target](parts)


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
    costs: dict[Any, tuple[int, Exchange]] = {}
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
                    costs[key] = temporary_bytes(compiled[key]), sent
                steps[array.of_role(role)] = compiled[key]
            by_gradient[array.of_role(Role.GRADIENT)] = costs[parts, wide, wide]
    return PartSums(steps, by_gradient)


def _compile(parts: Parts, dtype: Any, total_dtype: Any) -> Any:
    layout = parts.layout
    given = jax.ShapeDtypeStruct(layout.padded, dtype, sharding=layout.device)
    run = partial(parts.exchange, dtype=total_dtype)
    jitted = jax.jit(run, out_shardings=parts.total.device)
    return compile_for(parts.mesh, jitted.lower(given))
