"""The offloaded step: one executable whose parameters and state rest on the host.

The program moves what it needs by itself: each segment's parameters to the device
before its forward and again before its backward pass, gradients to the host, and the
arrays of an update to the device and back. Layers with one body run as a loop that
slices stacks of arrays in pinned host memory (as MaxText does with parameters), so that
compile time does not grow with depth. An iteration fetches the parameters of the next
one, which XLA's scheduler hides behind its own matmuls.

The operations are those of the streamed step: gradients are recomputed from the inputs
of each segment, all microbatches go through a segment before the next one starts, and
the separated updates run one leaf, layer or block of rows at a time. So the offloaded,
the streamed and the fused step agree up to the rounding of XLA's fusions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.jaxpr.keys import to_words
from zinf.core.memory.host.pinned import Stack
from zinf.core.optim.squares import combined
from zinf.core.plan import OffloadedStep
from zinf.core.program import KEY, Role, SegmentSpec
from zinf.core.segment import Segmented, named_leaves
from zinf.core.segment.loops import Part
from zinf.core.sharding import AxisRule, Dim
from zinf.core.sharding.mesh import local_devices
from zinf.core.step.whole.frame import Frame
from zinf.core.step.whole.loops import LayerLoop
from zinf.core.step.whole.microbatches import cotangents_of, outputs_of, summed
from zinf.core.step.whole.offloading import Offloading
from zinf.core.step.whole.stack_update import ON_DEVICE, ON_HOST
from zinf.core.step.whole.transfers import Traced, Transfers
from zinf.core.topology import memory


@dataclass(frozen=True)
class OffloadedProgram:
    """The compiled step.

    Its groups of arrays (`Frame`) are `changed` and `fixed`, the stacks of arrays that
    the step updates and only reads.

    Attributes:
        device_bytes: what one device holds while the step runs.
        host_bytes: what this process holds in host memory meanwhile: stacks, and
            gradients that wait for the end of the backward pass.
        moved: what the devices of this process move in a step.
        num_loops: the loops over layers.
        updates_in_passes: whether loops update layers before the whole gradient is
            known.
    """

    step: jax.stages.Compiled
    changed: tuple[Stack, ...]
    fixed: tuple[Stack, ...]
    device_bytes: int
    host_bytes: int
    flops: int
    moved: OffloadedStep
    num_loops: int
    updates_in_passes: bool

    @property
    def groups(self) -> tuple[tuple[Stack, ...], tuple[Stack, ...]]:
        """The stacks that the step changes, and those that it only reads."""
        return self.changed, self.fixed

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (*self.changed, *self.fixed)


def not_offloadable(rule: AxisRule) -> list[str]:
    """Features of the mesh that offloaded steps do not support, in words.

    It is a divided sequence, divided weights, and groups of devices that hold all
    parameters.
    """
    asked = {
        f"mesh.seq = {rule.size(Dim.SEQUENCE)}": rule.size(Dim.SEQUENCE) > 1,
        f"mesh.tensor = {rule.size(Dim.CHANNELS)}": rule.size(Dim.CHANNELS) > 1,
        "zero_hpz_partition_size": rule.gathers_in_group,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def check_offloadable(rule: AxisRule) -> None:
    """Raise for meshes on which the offloaded step has not been shown to work.

    Raises:
        NotImplementedError: `not_offloadable` names something.
    """
    found = not_offloadable(rule)
    if found:
        raise NotImplementedError(
            "execution is 'offloaded', which does not work yet with "
            f"{' and '.join(found)}. Use execution: streamed."
        )


def compile_offloaded(
    frame: Frame,
    segmented: Segmented,
    *,
    offloads_values: bool = False,
    updates_in_passes: bool = False,
) -> OffloadedProgram:
    """Compiles the offloaded step for one mesh and shape of microbatch.

    Args:
        segmented, offloads_values, updates_in_passes: see `Offloading`.
    """
    if segmented.program.tilings:
        paths = ", ".join(tiling.path for tiling in segmented.program.tilings)
        raise NotImplementedError(
            f"execution is 'offloaded', which does not read tiles, and {paths} would "
            "be read by tile because of segment.max_bytes. Raise segment.max_bytes, or "
            "use execution: streamed."
        )
    plan = Offloading(frame, segmented, offloads_values, updates_in_passes)
    groups = plan.changed, plan.fixed
    arrays = [[stack.abstract() for stack in group] for group in groups]
    results = [stack.sharding for stack in plan.changed]
    compiled = frame.compile(_Step(plan).step, arrays, results)
    at_rest = sum(stack.nbytes for stack in plan.at_rest.stacks)
    on_device, on_host = _workspace(compiled, plan.gradient_bytes)
    mesh = frame.layouts.mesh
    num_local = len(local_devices(mesh))
    return OffloadedProgram(
        compiled,
        *groups,
        on_device + frame.input_bytes,
        at_rest + num_local * on_host,
        plan.flops // mesh.size,
        plan.moved(num_local),
        num_loops=sum(part.is_loop for part in plan.parts),
        updates_in_passes=bool(plan.in_passes),
    )


def _workspace(compiled: jax.stages.Compiled, gradient_bytes: int) -> tuple[int, int]:
    """Bytes of temporaries and new results, on a device and in its host's memory."""
    found = memory(compiled)
    on_device = found.temp_bytes + found.output_bytes - found.alias_bytes
    on_host = found.host_temp_bytes + found.host_output_bytes - found.host_alias_bytes
    if found.host_argument_bytes:
        return on_device, on_host
    # The CPU has one memory: gradients that wait on the host are among temporaries.
    on_host = min(gradient_bytes, on_device)
    return on_device - on_host, on_host


class _Step:
    """The step as a traceable function."""

    def __init__(self, plan: Offloading):
        self.plan, self.frame = plan, plan.frame
        self.transfers = Transfers(plan)

    def step(
        self,
        changed: Sequence[Any],
        fixed: Sequence[Any],
        batch: Any,
        keys: Any,
        scalars: Sequence[Any],
        loss_scale: Any,
        weight: Any,
    ) -> tuple[list[Any], Mapping[str, Any]]:
        plan, frame = self.plan, self.frame
        rest = dict(zip(plan.changed, changed, strict=True))
        rest |= dict(zip(plan.fixed, fixed, strict=True))
        rest = {stack: _on_host(content) for stack, content in rest.items()}
        for stack in plan.at_rest.stacks:
            if stack.members[0].role == Role.PARAM and plan.moves_whole(stack):
                rest[stack] = jax.device_put(rest[stack], ON_DEVICE)
        run = Traced(rest, loss_scale / weight, self._inputs(batch, keys))
        late = [stack for stack in plan.updates if stack not in plan.in_passes]
        for stack in late:
            run.gradients[stack] = self.transfers.zeros(stack)
        for part in plan.parts[:-1]:
            if part.is_loop:
                self._loop(part).forward(run)
            else:
                self._forward(run, *part.segments)
        outputs = self._loss(run)
        names, structure = plan.segmented.program.outputs, plan.segmented.structure
        losses, extra = jax.tree.unflatten(structure, [outputs[n] for n in names])
        shared, step_values = frame.step_values(scalars, losses, weight, ())
        if plan.in_passes:
            run.decided = 1 / loss_scale, jnp.all(jnp.isfinite(losses)), step_values
        for part in reversed(plan.parts[:-1]):
            if plan.specs[part.segments[0]].has_backward:
                if part.is_loop:
                    self._loop(part).backward(run)
                else:
                    self._backward(run, *part.segments)
        judged = frame.judged(losses, combined(run.squares), loss_scale)
        _, *decided = judged
        for stack in late:
            self._update(run, stack, (*decided, step_values))
        outputs = {"losses": losses, "judged": judged, "extra": extra, "shared": shared}
        results = [jax.device_put(run.rest[s], ON_HOST) for s in plan.changed]
        return results, outputs

    def _loop(self, part: Part) -> LayerLoop:
        leaves = jax.tree.leaves(self.frame.batch)
        num_examples = next((x.shape[0] for x in leaves if x.shape), None)
        return LayerLoop(self.plan, part, num_examples)

    def _inputs(self, batch: Any, keys: Any) -> dict[str, Any]:
        """The values that no segment computes."""
        values = {f"batch/{name}": x for name, x in named_leaves(batch).items()}
        if keys is not None:
            values[KEY] = to_words(keys)
        for name, content in self.plan.segmented.consts.items():
            content = jnp.asarray(content)
            shape = (self.frame.num_microbatches, *content.shape)
            values[name] = jnp.broadcast_to(content, shape)
        return values

    # The passes of one segment.

    def _forward(self, run: Traced, number: int) -> None:
        spec = self.plan.specs[number]
        rest = *self._operands(run, number), self.frame.num_microbatches
        outputs = outputs_of(self.plan.passes[number], *rest)
        run.values.update(zip(spec.outputs, outputs, strict=True))

    def _loss(self, run: Traced) -> dict[str, Any]:
        """The outputs of the last segment, after its backward pass."""
        spec, passes = self.plan.specs[-1], self.plan.passes[-1]
        wholes, hoisted, inputs = self._operands(run, -1)

        def one(inputs: Sequence[Any], _: Any) -> tuple[Any, Any, Any]:
            return passes.loss([*wholes, *inputs, *hoisted], run.seed)

        found = summed(one, inputs, [], self.frame.num_microbatches)
        outputs, gradients, cotangents = found
        self._collect(run, spec, gradients, cotangents)
        return dict(zip(spec.outputs, outputs, strict=True))

    def _backward(self, run: Traced, number: int) -> None:
        spec, passes = self.plan.specs[number], self.plan.passes[number]
        given = [
            run.cotangents.pop(name, jnp.zeros_like(run.values[name]))
            for name, is_active in zip(spec.outputs, passes.are_active, strict=True)
            if is_active
        ]
        rest = given, self.frame.num_microbatches
        found = cotangents_of(passes, *self._operands(run, number), *rest)
        self._collect(run, spec, *found)

    def _operands(self, run: Traced, number: int) -> tuple[Any, Any, Any]:
        """The gathered parameters, hoisted literals and inputs of a segment."""
        spec = self.plan.specs[number]
        contents = self.transfers.params(run.rest, spec)
        hoisted = self.plan.segmented.shared[number].hoisted
        inputs = [run.values[name] for name in spec.inputs]
        return self.transfers.wholes(spec, contents), hoisted, inputs

    def _collect(
        self,
        run: Traced,
        spec: SegmentSpec,
        gradients: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> None:
        """Add to the cotangents and gradients of a segment's arguments."""
        for name, cotangent in zip(spec.active_inputs, cotangents, strict=True):
            run.add_cotangent(name, cotangent)
        for array, gradient in zip(spec.trained_params, gradients, strict=True):
            dtype = self.plan.gradient_dtype(self.plan.stack(array))
            gradient = gradient.astype(dtype)
            before = run.totals.get(array)
            run.totals[array] = gradient if before is None else before + gradient
            if self.plan.first_uses[array] is spec:
                total = run.totals.pop(array)
                run.squares.append(self.transfers.keep(run.gradients, array, total))

    # Updates after the passes.

    def _update(
        self, run: Traced, params: Stack, decided: tuple[Any, Any, Sequence[Any]]
    ) -> None:
        """Update the leaves of a stack, one layer or block of rows at a time."""
        update = self.plan.updates[params]
        gradient = run.gradients.pop(params)

        def block(contents: Sequence[Any], number: Any) -> list[Any]:
            """The stacks after the update of one layer or block."""
            old = [update.take(x, number) for x in contents[: len(update.read)]]
            grad = update.take(gradient, number)
            new = update.new(*decided, grad, old, number)
            return update.put(contents, new, number)

        contents = [run.rest[stack] for stack in update.written]
        if update.is_whole:
            contents = [jax.device_put(content, ON_DEVICE) for content in contents]
        count, _ = update.blocks
        if count == 1 and not params.is_stacked:
            contents = block(contents, 0)
        else:
            steps = jnp.arange(count, dtype=jnp.int32)
            contents, _ = jax.lax.scan(
                lambda carry, number: (block(carry, number), None), contents, steps
            )
        run.rest.update(zip(update.written, contents, strict=True))


def _on_host(content: Any) -> Any:
    """Content in host memory: it is there, except to jax on devices without memories.

    Those are the GPUs that are only compiled for. There `compile_for` takes from this
    operation that the argument is in host memory, and nothing is copied.
    """
    is_there = jax.typeof(content).memory_space == ON_HOST
    return content if is_there else jax.device_put(content, ON_HOST)
