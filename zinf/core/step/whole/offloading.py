"""What an offloaded step does, decided before it is traced."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from zinf.core.memory.host.pinned import Stack
from zinf.core.plan import OffloadedStep, count_contributions
from zinf.core.program import ArrayId, Role, SegmentSpec
from zinf.core.segment import Segmented
from zinf.core.segment.loops import Part
from zinf.core.segment.passes import BodyPasses
from zinf.core.sharding import Layouts
from zinf.core.step.sums import sum_dtype
from zinf.core.step.whole.frame import Frame, device_bytes
from zinf.core.step.whole.stack_update import StackUpdate
from zinf.core.step.whole.stacks import AtRestTogether


@dataclass(frozen=True, eq=False)
class Offloading:
    """What an offloaded step is made of, and what it holds and moves.

    Attributes:
        segmented: the training loss in segments, without tiles.
        offloads_values: the values that the backward pass of a loop starts from wait on
            the host.
        updates_in_passes: the backward pass of a loop updates each layer as soon as its
            gradient is known. The state of the layer is on the device meanwhile, and
            its gradient is never on the host. Only for steps without clipping and
            without a loss scale: a gradient that is not finite is found after updates.
    """

    frame: Frame
    segmented: Segmented
    offloads_values: bool = False
    updates_in_passes: bool = False

    @property
    def layouts(self) -> Layouts:
        return self.frame.layouts

    @property
    def specs(self) -> tuple[SegmentSpec, ...]:
        return self.segmented.program.segments

    @cached_property
    def passes(self) -> list[BodyPasses]:
        """The passes of each segment."""
        found = []
        for shared, spec in zip(self.segmented.shared, self.specs, strict=True):
            arrays = spec.trained_params
            gradients = [self.layouts.of(a.of_role(Role.GRADIENT)) for a in arrays]
            found.append(BodyPasses(shared.body, spec, tuple(gradients)))
        return found

    @cached_property
    def at_rest(self) -> AtRestTogether:
        frame = self.frame
        rest = frame.problem, frame.separated, frame.layouts, self.specs
        return AtRestTogether(*rest)

    @property
    def parts(self) -> list[Part]:
        return self.at_rest.parts

    @cached_property
    def changed(self) -> tuple[Stack, ...]:
        """The stacks that the step updates."""
        return tuple(s for s in self.at_rest.stacks if self._is_trained(s))

    @cached_property
    def fixed(self) -> tuple[Stack, ...]:
        """The stacks that the step only reads."""
        return tuple(s for s in self.at_rest.stacks if not self._is_trained(s))

    def _is_trained(self, stack: Stack) -> bool:
        return stack.members[0].path in self.at_rest.updates

    @cached_property
    def updates(self) -> Mapping[Stack, StackUpdate]:
        """The update of each stack of trained parameters."""
        by_row = frozenset(self._read_by_row)
        return {
            s: StackUpdate(self.at_rest, s, by_row, self.moves_whole(s))
            for s in self.changed
            if s.members[0].role == Role.PARAM
        }

    @cached_property
    def in_passes(self) -> frozenset[Stack]:
        """The stacks of parameters that the backward pass of a loop updates."""
        return frozenset(
            stack
            for part in self.parts[:-1]
            for stack in self.stacks_of(self.specs[part.segments[0]])
            if self.updates_in_passes and self._completes(part, stack)
        )

    @cached_property
    def first_uses(self) -> Mapping[ArrayId, SegmentSpec]:
        """The segment whose backward pass completes the gradient of each array."""
        found: dict[ArrayId, SegmentSpec] = {}
        for spec in self.specs:
            if spec.has_backward or spec is self.specs[-1]:
                for array in spec.trained_params:
                    found.setdefault(array, spec)
        return found

    def stacks_of(self, spec: SegmentSpec) -> list[Stack]:
        """The stacks that hold the gradients of a segment, each once."""
        arrays = [self.stack(array) for array in spec.trained_params]
        return list(dict.fromkeys(arrays))

    def stack(self, array: ArrayId) -> Stack:
        """The stack that an array, or rows of it, rests in."""
        return self.at_rest.places[array.whole][0]

    def moves_whole(self, stack: Stack) -> bool:
        """Whether all layers of a stack go to the device at once.

        Layers that are vectors do: a copy of one takes longer to begin than to move,
        and the TPU compiler slices no rows of a matrix on the host.
        """
        num_dims = len(stack.layout.padded)
        if not stack.is_stacked:
            num_dims -= stack.members[0].path in self._read_by_row
        return num_dims < 2

    def gradient_dtype(self, stack: Stack) -> Any:
        """The dtype of the gradients of a stack of parameters."""
        path = stack.members[0].path
        counts = [n for (p, _), n in self._contributions.items() if p == path]
        dtype = jnp.dtype(stack.dtype)
        return sum_dtype(dtype) if max(counts, default=0) > 1 else dtype

    # What the step holds and moves, on one device.

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients on the host, for one device."""
        return sum(
            device_bytes(stack.abstract(self.gradient_dtype(stack)))
            for stack in self.updates
            if stack not in self.in_passes
        )

    def moved(self, num_devices: int) -> OffloadedStep:
        """The bytes that the program moves, for some devices with equal shares."""
        fetched, written = {True: 0, False: 0}, {True: 0, False: 0}
        for params, update in self.updates.items():
            is_late = params not in self.in_passes
            # A pass has the parameters.
            read = [s for s in update.read if is_late or s is not params]
            fetched[is_late] += sum(device_bytes(s.abstract()) for s in read)
            written[is_late] += sum(device_bytes(s.abstract()) for s in update.written)
        params = [s for s in self.at_rest.stacks if s.members[0].role == Role.PARAM]
        param_bytes = sum(device_bytes(stack.abstract()) for stack in params)
        gradients = self.gradient_bytes
        late = gradients + fetched[True], written[True]
        h2d = 2 * param_bytes + fetched[False] + late[0]
        d2h = gradients + written[False] + late[1]
        return OffloadedStep(*[n * num_devices for n in (h2d, d2h, *late)])

    @property
    def flops(self) -> int:
        """A forward pass, its repetition in the backward pass, and the gradients."""
        each = [spec.flops * (4 if spec.has_backward else 1) for spec in self.specs]
        each[-1] = self.specs[-1].flops * 3
        return sum(each) * self.frame.num_microbatches

    @cached_property
    def _read_by_row(self) -> set[str]:
        read = [array for spec in self.specs for array in spec.params]
        return {array.path for array in read if array.rows is not None}

    @cached_property
    def _contributions(self) -> Mapping[Any, int]:
        program = self.segmented.program
        return count_contributions(program, self.frame.num_microbatches)

    def _completes(self, part: Part, params: Stack) -> bool:
        """Whether a loop may update these parameters as it runs.

        Iteration i completes the gradient of block i, and the iterations cover all
        blocks. Stacks of vectors are updated as wholes.
        """
        if not self.specs[part.segments[0]].has_backward:
            return False
        update = self.updates[params]
        count, rows = update.blocks
        is_layer = params.is_stacked or rows == 1
        is_all = part.is_loop and count == len(part.segments)
        return is_layer and is_all and not update.is_whole
