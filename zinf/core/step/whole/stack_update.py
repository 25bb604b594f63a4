"""The update of the leaves of a stack inside an offloaded step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.memory.host.pinned import Stack
from zinf.core.optim.separate import LeafUpdate
from zinf.core.optim.update import update_function
from zinf.core.program import Role
from zinf.core.step.updates import block_bytes
from zinf.core.step.whole.stacks import AtRestTogether

ON_DEVICE, ON_HOST = jax.memory.Space.Device, jax.memory.Space.Host
# Blocks of rows of a matrix begin at multiples of this: tiles of a TPU's memory have 8
# rows of 32 bits, or 32 of 8 bits.
TILE_ROWS = 32


@dataclass(frozen=True)
class StackUpdate:
    """Updates the leaves of a stack one block at a time: a layer, or rows of a leaf.

    Attributes:
        params: the stack of the parameters.
        by_row: paths of the leaves that segments read in rows.
        is_whole: the stacks are on the device, all blocks at once.
    """

    at_rest: AtRestTogether
    params: Stack
    by_row: frozenset[str]
    is_whole: bool

    @cached_property
    def numbers(self) -> list[int]:
        paths = [array.path for array in self.params.members]
        return [self.at_rest.updates[path][0] for path in paths]

    @cached_property
    def leaf(self) -> LeafUpdate:
        return self.at_rest.separated.leaves[self.numbers[0]]

    @cached_property
    def read(self) -> list[Stack]:
        """The stacks of the masters and of each optimizer state."""
        path = self.leaf.path
        arrays = [s.array(path) for s in self.leaf.states]
        master = self.at_rest.master(path)
        return [self.at_rest.places[array][0] for array in (master, *arrays)]

    @property
    def has_master(self) -> bool:
        return self.at_rest.master(self.leaf.path).role == Role.MASTER

    @property
    def written(self) -> list[Stack]:
        """`read`, and the stack of the parameters if the masters are others."""
        return [*self.read, self.params] if self.has_master else self.read

    @cached_property
    def blocks(self) -> tuple[int, int | None]:
        """`(number of blocks, rows of each)`.

        None rows: a block is a whole layer or leaf.
        """
        master = self.read[0]
        if master.is_stacked:
            return len(master.members), None
        layout = master.layout
        if not self.leaf.is_elementwise or not layout.has_whole_rows:
            return 1, None
        num_rows = layout.padded[0]
        if self.leaf.path in self.by_row:
            return num_rows, 1
        nbytes = prod(layout.padded) * np.dtype(master.dtype).itemsize
        wanted = -(-nbytes // block_bytes(self.at_rest.separated))
        fitting = (
            n
            for n in range(wanted, num_rows + 1)
            if num_rows % n == 0 and num_rows // n % TILE_ROWS == 0
        )
        count = next(fitting, 1)
        return (count, num_rows // count) if count > 1 else (1, None)

    def take(self, content: Any, number: Any) -> Any:
        """One block of a stack, on the device."""
        _, rows = self.blocks
        if self.params.is_stacked:
            content = row(content, number)
        elif rows is not None:
            first = number * rows
            content = jax.lax.dynamic_slice_in_dim(content, first, rows)
        return jax.device_put(content, ON_DEVICE)

    def put(self, contents: Sequence[Any], new: Sequence[Any], number: Any) -> Any:
        """The contents of `written` with one block replaced."""
        _, rows = self.blocks
        results = []
        for content, stack, value in zip(contents, self.written, new, strict=True):
            sharding = stack.layout.share
            if not sharding.is_fully_replicated:
                value = jax.lax.with_sharding_constraint(value, sharding)
            there = value if self.is_whole else jax.device_put(value, ON_HOST)
            if self.params.is_stacked:
                there = with_row(content, number, there)
            elif rows is not None:
                first = number * rows
                there = jax.lax.dynamic_update_slice_in_dim(
                    content, there, first, axis=0
                )
            results.append(there)
        return results

    def new(
        self,
        factor: Any,
        is_finite: Any,
        step_values: Sequence[Any],
        gradient: Any,
        old: Sequence[Any],
        number: Any,
    ) -> list[Any]:
        """The new block of each stack of `written`; the old one if not `is_finite`.

        Args:
            is_finite: whether the gradient is finite.
            old: the block of each stack of `read`.
        """
        mine = [step_values[k] for k in self.leaf.step_values]
        at = number if self.params.is_stacked else 0
        hoisted = [column[at] for column in self._columns]
        results = self._function(factor, mine, hoisted, gradient, old[0], old[1:])
        pairs = zip(results, old, strict=True)
        kept = [jnp.where(is_finite, y, x) for y, x in pairs]
        if self.has_master:
            kept.append(kept[0].astype(self.params.dtype))
        return kept

    @cached_property
    def _bodies(self) -> list[Any]:
        _, rows = self.blocks
        shape = self.at_rest.layouts.of(self.at_rest.master(self.leaf.path)).padded
        shape = shape if rows is None else (rows, *shape[1:])
        wanted = [(number, shape) for number in self.numbers]
        return self.at_rest.separated.bodies(wanted)

    @cached_property
    def _function(self) -> Any:
        return update_function(self._bodies[0].body, None)

    @property
    def _columns(self) -> list[Any]:
        """The hoisted literals of the update, each with one row for each layer."""
        rows = [body.hoisted for body in self._bodies]
        return [jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True)]


def row(stack: Any, number: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


def with_row(stack: Any, number: Any, content: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(stack, content, number, axis=0)
