"""Which arrays of an offloaded step rest together, and where each one is found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zinf.core.memory.host.pinned import Stack
from zinf.core.optim.separate import LeafUpdate, Separated
from zinf.core.problem.problem import Problem
from zinf.core.program import ArrayId, Role, SegmentSpec
from zinf.core.segment.loops import Part, find_parts
from zinf.core.sharding import Layouts


@dataclass(frozen=True)
class AtRestTogether:
    """The arrays of a problem as stacks, for the loops of a program.

    The arrays that a loop over layers reads at one place rest as one stack, and so do
    their masters and each of their optimizer states. A leaf that its model stacks over
    layers is a stack already.
    """

    problem: Problem
    separated: Separated
    layouts: Layouts
    specs: Sequence[SegmentSpec]

    @cached_property
    def parts(self) -> list[Part]:
        return find_parts(self.specs, self._is_alike)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        found: dict[ArrayId, Stack] = {}
        for part in self.parts:
            if part.is_loop:
                rows = [self.specs[k].params for k in part.segments]
                for arrays in zip(*rows, strict=True):
                    if arrays[0].rows is None:
                        found.update(self._stacked([a.path for a in arrays]))
        arrays = self.layouts.arrays
        for array in arrays:
            if array not in found:
                found[array] = self._stack([array])
        return tuple(dict.fromkeys(found[array] for array in arrays))

    @cached_property
    def places(self) -> Mapping[ArrayId, tuple[Stack, int]]:
        """The stack of each whole array, and its position there."""
        return {a: (s, n) for s in self.stacks for n, a in enumerate(s.members)}

    @cached_property
    def updates(self) -> Mapping[str, tuple[int, LeafUpdate]]:
        """The number and the update of each trained leaf."""
        leaves = enumerate(self.separated.leaves)
        return {leaf.path: (number, leaf) for number, leaf in leaves}

    def master(self, path: str) -> ArrayId:
        """The array of a trained leaf that its update changes."""
        return self.problem.params[path].updated()

    @cached_property
    def _by_path(self) -> Mapping[str, list[ArrayId]]:
        found: dict[str, list[ArrayId]] = {}
        for array in self.layouts.arrays:
            found.setdefault(array.path, []).append(array)
        return found

    def _stacked(self, paths: Sequence[str]) -> dict[ArrayId, Stack]:
        """The stacks of the arrays of equal leaves, by member."""
        columns = zip(*[self._by_path[path] for path in paths], strict=True)
        stacks = [self._stack(column) for column in columns]
        return {array: stack for stack in stacks for array in stack.members}

    def _stack(self, arrays: Sequence[ArrayId]) -> Stack:
        return Stack(tuple(arrays), self.layouts.arrays[arrays[0]])

    def _is_alike(self, array: ArrayId, other: ArrayId, distance: int) -> bool:
        if array.rows is None or other.rows is None:
            return array.rows == other.rows and self._kind(array) == self._kind(other)
        start, stop = array.rows
        shift = distance * (stop - start)
        return array.path == other.path and other.rows == (start + shift, stop + shift)

    def _kind(self, array: ArrayId) -> Any:
        """The key of the stack of a leaf: leaves with equal keys rest in one stack."""
        path = array.path
        arrays = [(a.kind, self.layouts.arrays[a]) for a in self._by_path[path]]
        update = None
        if path in self.updates:
            number, leaf = self.updates[path]
            update = id(self._bodies[number].body), leaf.step_values
        return arrays, self.layouts.of(ArrayId(Role.GRADIENT, path)), update

    @cached_property
    def _bodies(self) -> list[Any]:
        shapes = [
            (number, self.layouts.of(self.master(leaf.path)).padded)
            for number, leaf in enumerate(self.separated.leaves)
        ]
        return self.separated.bodies(shapes)
