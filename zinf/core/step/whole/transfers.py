"""Moves parameters and gradients between host and devices inside an offloaded step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.memory.host.pinned import Stack
from zinf.core.optim.squares import Squares, squares
from zinf.core.program import ArrayId, Role, SegmentSpec
from zinf.core.sharding import as_cut, gather
from zinf.core.step.whole.offloading import Offloading
from zinf.core.step.whole.stack_update import ON_DEVICE, ON_HOST, row, with_row

Rest = dict[Stack, Any]


@dataclass
class Traced:
    """What a trace of the step has computed so far.

    Attributes:
        rest: the content of each stack.
        seed: the cotangent of each loss.
        values: by name, (num_microbatches, ...).
        saved: by first segment of a loop: the carried inputs of each iteration.
        cotangents: by name of the value.
        totals: sums of gradients of arrays that several segments read.
        gradients: complete gradients, on the host in the form of the stacks of their
            parameters.
        squares: sums of squares, or one for each iteration of a loop.
        decided: what updates within passes read: the factor of gradients, whether the
            losses are finite, and the step values.
    """

    rest: Rest
    seed: Any
    values: dict[str, Any] = field(default_factory=dict)
    saved: dict[int, Any] = field(default_factory=dict)
    cotangents: dict[str, Any] = field(default_factory=dict)
    totals: dict[ArrayId, Any] = field(default_factory=dict)
    gradients: Rest = field(default_factory=dict)
    squares: list[Squares] = field(default_factory=list)
    decided: tuple[Any, Any, Sequence[Any]] | None = None

    def add_cotangent(self, name: str, cotangent: Any) -> None:
        before = self.cotangents.get(name)
        self.cotangents[name] = cotangent if before is None else before + cotangent


@dataclass(frozen=True, eq=False)
class Transfers:
    """Reads and writes arrays where they rest.

    A `distance` is None for the array itself, or the number of iterations of a loop
    after the one that reads it.
    """

    plan: Offloading

    def params(self, rest: Rest, spec: SegmentSpec, distance: Any = None) -> list[Any]:
        """The parameters of a segment on the devices, cut as they are at rest."""
        return [self._fetch(rest, array, distance) for array in spec.params]

    def wholes(self, spec: SegmentSpec, contents: Sequence[Any]) -> list[Any]:
        """The parameters of a segment as its passes read them: gathered."""
        layouts = [self.plan.layouts.of(array) for array in spec.params]
        return [
            gather(content, replace(layout, device=layout.share, encoding=None))
            for layout, content in zip(layouts, contents, strict=True)
        ]

    def zeros(self, stack: Stack) -> Any:
        """Room for the gradients of a stack of parameters, on the host."""
        zeros = jnp.zeros(stack.shape, self.plan.gradient_dtype(stack))
        here = stack.sharding.with_memory_kind("device")
        if not here.is_fully_replicated:
            zeros = jax.lax.with_sharding_constraint(zeros, here)
        return zeros if self.plan.moves_whole(stack) else jax.device_put(zeros, ON_HOST)

    def keep(
        self, gradients: Rest, array: ArrayId, gradient: Any, distance: Any = None
    ) -> Squares:
        """Move a complete gradient to the host; return the sums of its squares."""
        there, square = self.complete(array, gradient)
        stack, n = self.plan.at_rest.places[array.whole]
        if not self.plan.moves_whole(stack):
            there = jax.device_put(there, ON_HOST)
        if stack.is_stacked:
            n = n if distance is None else n + distance
            there = with_row(gradients[stack], n, there)
        elif array.rows is not None:
            first, _ = _rows(array, distance)
            there = jax.lax.dynamic_update_slice_in_dim(
                gradients[stack], there, first, axis=0
            )
        gradients[stack] = there
        return square

    def complete(self, array: ArrayId, gradient: Any) -> tuple[Any, Squares]:
        """A complete gradient as its update reads it, and the sums of its squares."""
        sharding = self.plan.layouts.of(array.of_role(Role.GRADIENT)).share
        if not sharding.is_fully_replicated:
            gradient = as_cut(gradient, sharding)
        square = squares(gradient)
        return gradient.astype(self.plan.gradient_dtype(self.plan.stack(array))), square

    def _fetch(self, rest: Rest, array: ArrayId, distance: Any) -> Any:
        stack, n = self.plan.at_rest.places[array.whole]
        content = rest[stack]
        if stack.is_stacked:
            content = row(content, n if distance is None else n + distance)
        elif array.rows is not None:
            first, size = _rows(array, distance)
            content = jax.lax.dynamic_slice_in_dim(content, first, size)
        return jax.device_put(content, ON_DEVICE)


def _rows(array: ArrayId, distance: Any) -> tuple[Any, int]:
    """`(first row, number of rows)` that a loop reads after some iterations."""
    assert array.rows is not None
    start, stop = array.rows
    size = stop - start
    return (start if distance is None else start + distance * size), size
