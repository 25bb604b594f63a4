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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import to_words
from zinf.core.memory.host.pinned import Stack
from zinf.core.optim.clipping import Clipping
from zinf.core.optim.decision import judge
from zinf.core.optim.separate import Separated
from zinf.core.optim.squares import Squares, combined, squares
from zinf.core.plan import OffloadedStep, count_contributions
from zinf.core.problem.problem import Problem
from zinf.core.program import KEY, ArrayId, Role, SegmentSpec
from zinf.core.segment import Segmented, named_leaves
from zinf.core.segment.loops import Part
from zinf.core.segment.passes import BodyPasses
from zinf.core.sharding import AxisRule, Dim, Layouts, as_cut, gather
from zinf.core.sharding.mesh import local_devices, replicated
from zinf.core.step.sums import sum_dtype
from zinf.core.step.whole.fused import (
    batch_shardings,
    device_bytes,
    placed_specs,
    stacked_specs,
)
from zinf.core.step.whole.stack_update import (
    ON_DEVICE,
    ON_HOST,
    StackUpdate,
    row,
    with_row,
)
from zinf.core.step.whole.stacks import AtRestTogether
from zinf.core.topology import compile_for, memory

Rest = dict[Stack, Any]
# Two iterations are one in the compiled loop. What a loop carries has one buffer, so
# the parameters of the next iteration could arrive only after the last use of those of
# this one; of two, one set has a buffer of its own.
UNROLLED = 2


@dataclass(frozen=True)
class OffloadedProgram:
    """The compiled step.

    `step(changed, fixed, batch, keys, scalars, loss_scale, weight) -> (changed,
    outputs)`.
    `changed` (donated) and `fixed` are the stacks of arrays that the step updates and
    only reads. All other arguments, and the outputs, are those of `FusedProgram`.

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
        """What the step changes and what it only reads."""
        return self.changed, self.fixed

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (*self.changed, *self.fixed)


def not_offloadable(rule: AxisRule) -> list[str]:
    """What of a mesh the offloaded step has not been shown to work with.

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
    problem: Problem,
    separated: Separated,
    segmented: Segmented,
    batch: Any,
    *,
    key: jax.ShapeDtypeStruct | None,
    num_microbatches: int,
    clipping: Clipping,
    layouts: Layouts,
    offloads_values: bool = False,
    updates_in_passes: bool = False,
) -> OffloadedProgram:
    """Compiles the offloaded step for one mesh and shape of microbatch.

    Args:
        segmented: the training loss in segments, without tiles.
        offloads_values: the values that the backward pass of a loop starts from wait on
            the host.
        updates_in_passes: the backward pass of a loop updates each layer as soon as its
            gradient is known. The state of the layer is on the device meanwhile, and
            its gradient is never on the host. Only for steps without clipping and
            without a loss scale: a gradient that is not finite is found after updates.
    """
    if segmented.program.tilings:
        paths = ", ".join(tiling.path for tiling in segmented.program.tilings)
        raise NotImplementedError(
            f"execution is 'offloaded', which does not read tiles, and {paths} would "
            "be read by tile because of segment.max_bytes. Raise segment.max_bytes, or "
            "use execution: streamed."
        )
    made = _Step(
        problem,
        separated,
        segmented,
        num_microbatches,
        clipping,
        layouts,
        next((x.shape[0] for x in jax.tree.leaves(batch) if x.shape), None),
        offloads_values,
        updates_in_passes,
    )
    scalars = separated.step_value_specs
    if separated.reads_loss:
        scalars = separated.shared_specs
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    everywhere = replicated(layouts.mesh)
    inputs = placed_specs(
        (
            stacked_specs(batch, num_microbatches),
            stacked_specs(key, num_microbatches),
            list(scalars),
            scale,
            scale,
        ),
        (batch_shardings(batch, layouts), *[everywhere] * 4),
    )
    changed, fixed = made.changed, made.fixed
    stacks = [[_abstract(stack) for stack in group] for group in (changed, fixed)]
    results = [stack.sharding for stack in changed], everywhere
    jitted = jax.jit(made.step, donate_argnums=(0,), out_shardings=results)
    compiled = compile_for(layouts.mesh, jitted.lower(*stacks, *inputs))
    at_rest = sum(stack.nbytes for stack in (*changed, *fixed))
    on_device, on_host = _workspace(compiled, made.gradient_bytes)
    num_local = len(local_devices(layouts.mesh))
    return OffloadedProgram(
        compiled,
        changed,
        fixed,
        on_device + sum(map(device_bytes, jax.tree.leaves(inputs))),
        at_rest + num_local * on_host,
        made.flops // layouts.mesh.size,
        made.moved(num_local),
        num_loops=sum(part.is_loop for part in made.parts),
        updates_in_passes=bool(made.in_passes),
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


def _abstract(stack: Stack, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The array of a stack, or of as many numbers of another dtype."""
    dtype = jnp.dtype(stack.dtype) if dtype is None else dtype
    return jax.ShapeDtypeStruct(stack.shape, dtype, sharding=stack.sharding)


@dataclass
class _Run:
    """What a trace of the step has computed so far.

    Attributes:
        values: by name, (num_microbatches, ...).
        saved: by first segment of a loop: the carried inputs of each iteration.
        cotangents: by name of the value.
        totals: sums of gradients of arrays that several segments read.
        gradients: complete gradients, on the host in the form of the stacks of their
            parameters.
        squares: sums of squares, or one for each iteration of a loop.
        goes_by: what updates in passes go by: the factor of gradients, whether the
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
    goes_by: tuple[Any, Any, Sequence[Any]] | None = None


class _Step:
    """The step as a traceable function."""

    def __init__(
        self,
        problem: Problem,
        separated: Separated,
        segmented: Segmented,
        num_microbatches: int,
        clipping: Clipping,
        layouts: Layouts,
        num_examples: int | None,
        offloads_values: bool,
        updates_in_passes: bool,
    ):
        self.problem, self.separated, self.segmented = problem, separated, segmented
        self.num_microbatches, self.clipping = num_microbatches, clipping
        self.layouts, self.offloads_values = layouts, offloads_values
        self.num_examples = num_examples
        self.program = segmented.program
        self.specs = self.program.segments
        self.at_rest = AtRestTogether(problem, separated, layouts, self.specs)
        self.parts = self.at_rest.parts
        read = [array for spec in self.specs for array in spec.params]
        self.by_row = {array.path for array in read if array.rows is not None}
        self.counts = count_contributions(self.program, num_microbatches)
        trained = set(self.at_rest.updates)
        stacks = self.at_rest.stacks
        self.changed = tuple(s for s in stacks if s.members[0].path in trained)
        self.fixed = tuple(s for s in stacks if s.members[0].path not in trained)
        by_row = frozenset(self.by_row)
        self.of_stack = {
            s: StackUpdate(self.at_rest, s, by_row, self._moves_whole(s))
            for s in self._trained_params
        }
        # The stacks that the backward pass of a loop updates.
        self.in_passes = frozenset(
            stack
            for part in self.parts[:-1]
            for stack in self._stacks_of(self.specs[part.segments[0]])
            if updates_in_passes and self._completes(part, stack)
        )
        self.passes = [
            BodyPasses(shared.body, spec, self._gradient_layouts(spec))
            for shared, spec in zip(segmented.shared, self.specs, strict=True)
        ]

    # What the step holds and moves, on one device.

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients on the host, for one device."""
        return sum(
            device_bytes(_abstract(stack, self._grad_dtype(stack)))
            for stack in self._trained_params
            if stack not in self.in_passes
        )

    @property
    def param_bytes(self) -> int:
        stacks = (*self.changed, *self.fixed)
        params = [s for s in stacks if s.members[0].role == Role.PARAM]
        return sum(device_bytes(_abstract(stack)) for stack in params)

    def moved(self, num_devices: int) -> OffloadedStep:
        """The bytes that the program moves, for some devices with equal shares."""
        fetched, written = {True: 0, False: 0}, {True: 0, False: 0}
        for params, update in self.of_stack.items():
            is_late = params not in self.in_passes
            # A pass has the parameters.
            read = [s for s in update.read if is_late or s is not params]
            fetched[is_late] += sum(device_bytes(_abstract(s)) for s in read)
            written[is_late] += sum(device_bytes(_abstract(s)) for s in update.written)
        gradients = self.gradient_bytes
        late = gradients + fetched[True], written[True]
        h2d = 2 * self.param_bytes + fetched[False] + late[0]
        d2h = gradients + written[False] + late[1]
        return OffloadedStep(*[n * num_devices for n in (h2d, d2h, *late)])

    @property
    def flops(self) -> int:
        """A forward pass, its repetition in the backward pass, and the gradients."""
        each = [spec.flops * (4 if spec.has_backward else 1) for spec in self.specs]
        each[-1] = self.specs[-1].flops * 3
        return sum(each) * self.num_microbatches

    @property
    def _trained_params(self) -> list[Stack]:
        return [s for s in self.changed if s.members[0].role == Role.PARAM]

    def _grad_dtype(self, stack: Stack) -> Any:
        """The dtype of the gradients of a stack of parameters."""
        path = stack.members[0].path
        counts = [n for (p, _), n in self.counts.items() if p == path]
        dtype = jnp.dtype(stack.dtype)
        return sum_dtype(dtype) if max(counts, default=0) > 1 else dtype

    def _gradient_layouts(self, spec: SegmentSpec) -> tuple[Any, ...]:
        arrays = spec.trained_params
        return tuple(self.layouts.of(a.of_role(Role.GRADIENT)) for a in arrays)

    # The step.

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
        rest = dict(zip(self.changed, changed, strict=True))
        rest |= dict(zip(self.fixed, fixed, strict=True))
        rest = {stack: _on_host(content) for stack, content in rest.items()}
        for stack in self.at_rest.stacks:
            if stack.members[0].role == Role.PARAM and self._moves_whole(stack):
                rest[stack] = jax.device_put(rest[stack], ON_DEVICE)
        run = _Run(rest, loss_scale / weight, self._inputs(batch, keys))
        for stack in self._trained_params:
            if stack not in self.in_passes:
                run.gradients[stack] = self._zeros(stack)
        for part in self.parts[:-1]:
            forward = self._loop_forward if part.is_loop else self._forward
            forward(run, part)
        outputs = self._loss(run)
        losses, extra = jax.tree.unflatten(
            self.segmented.structure, [outputs[name] for name in self.program.outputs]
        )
        shared, step_values = [], scalars
        if self.separated.reads_loss:
            loss = jnp.sum(losses.astype(jnp.float32)) / weight
            shared, step_values = self.separated.advance(scalars, loss)
        if self.in_passes:
            run.goes_by = 1 / loss_scale, jnp.all(jnp.isfinite(losses)), step_values
        for part in reversed(self.parts[:-1]):
            if self.specs[part.segments[0]].has_backward:
                backward = self._loop_backward if part.is_loop else self._backward
                backward(run, part)
        square = combined(run.squares)
        judged = judge(
            losses, square, clipping=self.clipping, loss_scale=loss_scale, xp=jnp
        )
        _, *goes_by = judged
        for stack in self._trained_params:
            if stack not in self.in_passes:
                self._update(run, stack, (*goes_by, step_values))
        outputs = {"losses": losses, "judged": judged, "extra": extra, "shared": shared}
        results = [jax.device_put(run.rest[s], ON_HOST) for s in self.changed]
        return results, outputs

    def _inputs(self, batch: Any, keys: Any) -> dict[str, Any]:
        """The values that no segment computes."""
        values = {f"batch/{name}": x for name, x in named_leaves(batch).items()}
        if keys is not None:
            values[KEY] = to_words(keys)
        for name, content in self.segmented.consts.items():
            content = jnp.asarray(content)
            shape = (self.num_microbatches, *content.shape)
            values[name] = jnp.broadcast_to(content, shape)
        return values

    def _moves_whole(self, stack: Stack) -> bool:
        """Whether all layers of a stack go to the device at once.

        Layers that are vectors do: a copy of one takes longer to begin than to move,
        and the TPU compiler slices no rows of a matrix on the host.
        """
        num_dims = len(stack.layout.padded)
        if not stack.is_stacked:
            num_dims -= stack.members[0].path in self.by_row
        return num_dims < 2

    def _zeros(self, stack: Stack) -> Any:
        """Room for the gradients of a stack of parameters, on the host."""
        zeros = jnp.zeros(stack.shape, self._grad_dtype(stack))
        here = stack.sharding.with_memory_kind("device")
        if not here.is_fully_replicated:
            zeros = jax.lax.with_sharding_constraint(zeros, here)
        return zeros if self._moves_whole(stack) else jax.device_put(zeros, ON_HOST)

    # Parameters and gradients between host and device.

    def _fetch(self, rest: Rest, array: ArrayId, distance: Any = None) -> Any:
        """A parameter array on the devices, cut as it is at rest.

        Args:
            distance: None for the array itself, or the number of iterations of a loop
                after the one that reads it.
        """
        stack, n = self.at_rest.places[array.whole]
        content = rest[stack]
        if stack.is_stacked:
            content = row(content, n if distance is None else n + distance)
        elif array.rows is not None:
            start, stop = array.rows
            size = stop - start
            first = start if distance is None else start + distance * size
            content = jax.lax.dynamic_slice_in_dim(content, first, size)
        return jax.device_put(content, ON_DEVICE)

    def _whole(self, array: ArrayId, content: Any) -> Any:
        layout = self.layouts.of(array)
        return gather(content, replace(layout, device=layout.share, encoding=None))

    def _wholes(self, spec: SegmentSpec, contents: Sequence[Any]) -> list[Any]:
        pairs = zip(spec.params, contents, strict=True)
        return [self._whole(array, content) for array, content in pairs]

    def _params(self, rest: Rest, spec: SegmentSpec, distance: Any = None) -> list[Any]:
        return [self._fetch(rest, array, distance) for array in spec.params]

    def _kept_gradient(
        self, gradients: Rest, array: ArrayId, gradient: Any, distance: Any = None
    ) -> Any:
        """Move a complete gradient to the host; return the sums of its squares."""
        there, square = self._complete(array, gradient)
        stack, n = self.at_rest.places[array.whole]
        if not self._moves_whole(stack):
            there = jax.device_put(there, ON_HOST)
        if stack.is_stacked:
            n = n if distance is None else n + distance
            there = with_row(gradients[stack], n, there)
        elif array.rows is not None:
            start, stop = array.rows
            first = start if distance is None else start + distance * (stop - start)
            there = jax.lax.dynamic_update_slice_in_dim(
                gradients[stack], there, first, axis=0
            )
        gradients[stack] = there
        return square

    def _complete(self, array: ArrayId, gradient: Any) -> tuple[Any, Squares]:
        """A complete gradient as its update reads it, and the sums of its squares."""
        sharding = self.layouts.of(array.of_role(Role.GRADIENT)).share
        if not sharding.is_fully_replicated:
            gradient = as_cut(gradient, sharding)
        square = squares(gradient)
        stack, _ = self.at_rest.places[array.whole]
        return gradient.astype(self._grad_dtype(stack)), square

    # The passes of one segment.

    def _forward(self, run: _Run, part: Part) -> None:
        (number,) = part.segments
        spec = self.specs[number]
        inputs = [run.values[name] for name in spec.inputs]
        wholes = self._wholes(spec, self._params(run.rest, spec))
        outputs = self._outputs(number, wholes, self._hoisted(number), inputs)
        run.values.update(zip(spec.outputs, outputs, strict=True))

    def _loss(self, run: _Run) -> dict[str, Any]:
        """The outputs of the last segment, after its backward pass."""
        number = len(self.specs) - 1
        spec, passes = self.specs[-1], self.passes[-1]
        hoisted = self._hoisted(number)
        wholes = self._wholes(spec, self._params(run.rest, spec))

        def one(inputs: Sequence[Any], _: Any) -> tuple[Any, Any, Any]:
            return passes.loss([*wholes, *inputs, *hoisted], run.seed)

        inputs = [run.values[name] for name in spec.inputs]
        outputs, gradients, cotangents = self._summed(spec, one, inputs, [])
        self._collect(run, spec, gradients, cotangents)
        return dict(zip(spec.outputs, outputs, strict=True))

    def _backward(self, run: _Run, part: Part) -> None:
        (number,) = part.segments
        spec = self.specs[number]
        inputs = [run.values[name] for name in spec.inputs]
        flags = zip(spec.outputs, self.passes[number].are_active, strict=True)
        given = [
            run.cotangents.pop(name, jnp.zeros_like(run.values[name]))
            for name, is_active in flags
            if is_active
        ]
        wholes = self._wholes(spec, self._params(run.rest, spec))
        rest = wholes, self._hoisted(number), inputs, given
        self._collect(run, spec, *self._cotangents(number, *rest))

    def _outputs(
        self,
        number: int,
        wholes: Sequence[Any],
        hoisted: Sequence[Any],
        inputs: Sequence[Any],
    ) -> list[Any]:
        passes = self.passes[number]

        def one(microbatch: Sequence[Any]) -> list[Any]:
            return passes.call([*wholes, *microbatch, *hoisted])

        if self.num_microbatches == 1:
            return [y[None] for y in one([x[0] for x in inputs])]
        if not inputs:
            count = self.num_microbatches
            return [jnp.broadcast_to(y, (count, *y.shape)) for y in one([])]
        return jax.lax.map(one, list(inputs))

    def _cotangents(
        self,
        number: int,
        wholes: Sequence[Any],
        hoisted: Sequence[Any],
        inputs: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """`(gradients, cotangents of active inputs)` of a segment that is not last."""
        passes = self.passes[number]

        def one(microbatch: Sequence[Any], given: Sequence[Any]) -> Any:
            arguments = [*microbatch, *hoisted]
            return (), *passes.sort(passes.vjp([*wholes, *arguments], given))

        _, gradients, found = self._summed(passes.spec, one, inputs, cotangents)
        return gradients, found

    def _summed(
        self, spec: SegmentSpec, one: Callable, inputs: Any, cotangents: Any
    ) -> tuple[Any, list[Any], Any]:
        """What `one` returns for each microbatch, with the sums of the gradients."""
        if self.num_microbatches == 1:
            outputs, gradients, found = one(*jax.tree.map(_first, (inputs, cotangents)))
            outputs, found = jax.tree.map(_expanded, (list(outputs), found))
            return outputs, list(gradients), found

        def add(total: Any, microbatch: Any) -> tuple[Any, Any]:
            outputs, gradients, found = one(*microbatch)
            pairs = zip(total, gradients, strict=True)
            total = [t + g.astype(t.dtype) for t, g in pairs]
            return total, (outputs, found)

        first = jax.tree.map(_first, (inputs, cotangents))
        _, gradients, _ = jax.eval_shape(one, *first)
        zeros = [jnp.zeros(g.shape, sum_dtype(g.dtype)) for g in gradients]
        length = self.num_microbatches
        total, (outputs, found) = jax.lax.scan(
            add, zeros, (inputs, cotangents), length=length
        )
        return outputs, total, found

    def _collect(
        self,
        run: _Run,
        spec: SegmentSpec,
        gradients: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> None:
        """Add to the cotangents and gradients of a segment's arguments."""
        for name, cotangent in zip(spec.active_inputs, cotangents, strict=True):
            before = run.cotangents.get(name)
            total = cotangent if before is None else before + cotangent
            run.cotangents[name] = total
        for array, gradient in zip(spec.trained_params, gradients, strict=True):
            stack, _ = self.at_rest.places[array.whole]
            gradient = gradient.astype(self._grad_dtype(stack))
            before = run.totals.get(array)
            run.totals[array] = gradient if before is None else before + gradient
            if self._first_use(array) is spec:
                total = run.totals.pop(array)
                run.squares.append(self._kept_gradient(run.gradients, array, total))

    def _first_use(self, array: ArrayId) -> SegmentSpec:
        """The segment whose backward pass completes the gradient of an array."""
        return next(
            spec
            for spec in self.specs
            if (spec.has_backward or spec is self.specs[-1])
            and array in spec.trained_params
        )

    def _hoisted(self, number: int) -> tuple[Any, ...]:
        return self.segmented.shared[number].hoisted

    # The passes of a loop.

    def _columns(self, part: Part) -> list[Any]:
        """The hoisted literals of a loop, each with one row for each iteration."""
        rows = [self._hoisted(number) for number in part.segments]
        return [jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True)]

    def _loop_forward(self, run: _Run, part: Part) -> None:
        first, count = part.segments[0], len(part.segments)
        spec = self.specs[first]
        from_output = part.from_output
        carried = list(from_output)
        same = {
            j: run.values[name]
            for j, name in enumerate(spec.inputs)
            if j not in carried
        }
        initial = [run.values[spec.inputs[j]] for j in carried]
        dtypes = [x.dtype for x in initial]

        def layer(carry: Any, x: Any) -> tuple[Any, Any]:
            given, params = carry
            number, hoisted = x
            ahead = self._params(run.rest, spec, jnp.minimum(number + 1, count - 1))
            inputs = _merged(same, carried, given)
            wholes = self._wholes(spec, params)
            outputs = self._outputs(first, wholes, hoisted, inputs)
            new = [
                self._as_batch(outputs[from_output[j]].astype(dtype))
                for j, dtype in zip(carried, dtypes, strict=True)
            ]
            waiting = given
            if self.offloads_values:
                waiting = [jax.device_put(x, ON_HOST) for x in given]
            return (new, ahead), waiting

        start = [self._as_batch(x) for x in initial], self._params(run.rest, spec, 0)
        xs = jnp.arange(count, dtype=jnp.int32), self._columns(part)
        (last, ahead), saved = jax.lax.scan(layer, start, xs, unroll=UNROLLED)
        outputs = self.specs[part.segments[-1]].outputs
        for j, value in zip(carried, last, strict=True):
            run.values[outputs[from_output[j]]] = value
        run.saved[first] = saved, ahead

    def _loop_backward(self, run: _Run, part: Part) -> None:
        first, last, count = part.segments[0], part.segments[-1], len(part.segments)
        spec, passes = self.specs[first], self.passes[first]
        saved, params = run.saved.pop(first)
        from_output = part.from_output
        carried = list(from_output)
        names = enumerate(spec.inputs)
        same = {j: run.values[name] for j, name in names if j not in carried}
        active = [j for j, n in enumerate(spec.inputs) if n in spec.active_inputs]
        # The cotangent of an output is the sum over the inputs that it becomes.
        positions = [o for o in range(len(spec.outputs)) if passes.are_active[o]]
        outputs = self.specs[last].outputs
        given: dict[int, Any] = {}
        for j in active:
            if j in from_output:
                name = outputs[from_output[j]]
                zeros = jnp.zeros_like(run.values[name])
                given[j] = run.cotangents.pop(name, zeros)
        stacks = [s for s in self._stacks_of(spec) if s not in self.in_passes]
        early = [s for s in self._stacks_of(spec) if s in self.in_passes]
        written = [s for params in early for s in self.of_stack[params].written]

        def layer(carry: Any, x: Any) -> tuple[Any, Any]:
            of_carried, of_same, gradients, params, contents = carry
            gradients = dict(zip(stacks, gradients, strict=True))
            rest = run.rest | dict(zip(written, contents, strict=True))
            number, hoisted, waiting = x
            if self.offloads_values:
                waiting = [jax.device_put(x, ON_DEVICE) for x in waiting]
            before = jnp.maximum(number - 1, 0)
            ahead = self._params(rest, spec, before)
            ahead = self._fetched(rest, spec, early, ahead)
            state = self._states(rest, early, number)
            inputs = _merged(same, carried, waiting)
            of_outputs = [
                sum(
                    (of_carried[j] for j in of_carried if from_output[j] == position),
                    start=0,
                )
                for position in positions
            ]
            wholes = self._wholes(spec, params)
            found, cotangents = self._cotangents(
                first, wholes, hoisted, inputs, of_outputs
            )
            by_input = dict(zip(active, cotangents, strict=True))
            of_carried = {j: self._as_batch(by_input[j]) for j in of_carried}
            of_same = {j: x + by_input[j] for j, x in of_same.items()}
            found_squares = []
            read = dict(zip(spec.params, params, strict=True))
            for array, gradient in zip(spec.trained_params, found, strict=True):
                stack, _ = self.at_rest.places[array.whole]
                if stack in early:
                    gradient, square = self._complete(array, gradient)
                    old = state[early.index(stack)]
                    self._update_layer(
                        run, rest, stack, gradient, read[array], old, number
                    )
                else:
                    square = self._kept_gradient(gradients, array, gradient, number)
                found_squares.append(square)
            contents = [rest[s] for s in written]
            gradients = [gradients[s] for s in stacks]
            return (of_carried, of_same, gradients, ahead, contents), found_squares

        start = (
            given,
            {j: jnp.zeros_like(same[j]) for j in active if j in same},
            [run.gradients[s] for s in stacks],
            params,
            [run.rest[s] for s in written],
        )
        xs = jnp.arange(count, dtype=jnp.int32), self._columns(part), saved
        (of_carried, of_same, gradients, _, contents), found_squares = jax.lax.scan(
            layer, start, xs, reverse=True, unroll=UNROLLED
        )
        run.gradients.update(zip(stacks, gradients, strict=True))
        run.rest.update(zip(written, contents, strict=True))
        run.squares += found_squares
        for j, cotangent in (of_carried | of_same).items():
            name = spec.inputs[j]
            before = run.cotangents.get(name)
            total = cotangent if before is None else before + cotangent
            run.cotangents[name] = total

    def _stacks_of(self, spec: SegmentSpec) -> list[Stack]:
        """The stacks that hold the gradients of a segment, each once."""
        arrays = [self.at_rest.places[a.whole][0] for a in spec.trained_params]
        return list(dict.fromkeys(arrays))

    def _as_batch(self, value: Any) -> Any:
        """A value of all microbatches; one with their examples is sharded like them.

        Otherwise the compiler may hold whole what a loop carries. It is a guess: a
        wrong one costs exchanges, and changes no number.
        """
        rule = self.layouts.rule
        if rule.size(Dim.BATCH) == 1 or value.shape[1:2] != (self.num_examples,):
            return value
        return jax.lax.with_sharding_constraint(value, rule.sharding([None, Dim.BATCH]))

    # Updates.

    def _completes(self, part: Part, params: Stack) -> bool:
        """Whether each iteration of a part completes one block, and all together all.

        Stacks of vectors are updated as wholes.
        """
        if not self.specs[part.segments[0]].has_backward:
            return False
        update = self.of_stack[params]
        count, rows = update.blocks
        is_layer = params.is_stacked or rows == 1
        is_all = part.is_loop and count == len(part.segments)
        return is_layer and is_all and not update.is_whole

    def _states(self, rest: Rest, early: Sequence[Stack], number: Any) -> list[Any]:
        """What updates in a pass read of one layer, besides the parameters it has."""
        return [
            [
                self.of_stack[s].take(rest[x], number)
                for x in self.of_stack[s].read
                if x is not s
            ]
            for s in early
        ]

    def _fetched(
        self,
        rest: Rest,
        spec: SegmentSpec,
        early: Sequence[Stack],
        params: Sequence[Any],
    ) -> list[Any]:
        """Make later writes of parameters in `rest` wait until these rows are read.

        Without an order of the two, the TPU compiler copies each stack as a whole, on
        the host and in every iteration, so that both may run at once.
        """
        params = list(params)
        for n, array in enumerate(spec.params):
            stack, _ = self.at_rest.places[array.whole]
            if stack in early:
                held = jax.lax.optimization_barrier((params[n], rest[stack]))
                params[n], rest[stack] = held
        return params

    def _update_layer(
        self,
        run: _Run,
        rest: Rest,
        params: Stack,
        gradient: Any,
        param: Any,
        state: Sequence[Any],
        number: Any,
    ) -> None:
        """Update one layer of a stack in `rest`, within a pass.

        Args:
            param: the parameters of the layer, as they rest.
            state: what `_states` returned for the layer.
        """
        update = self.of_stack[params]
        assert run.goes_by is not None
        factor, is_finite, step_values = run.goes_by
        old = state if update.has_master else [param, *state]
        new = update.new(factor, is_finite, step_values, gradient, old, number)
        contents = [rest[stack] for stack in update.written]
        contents = update.put(contents, new, number)
        rest.update(zip(update.written, contents, strict=True))

    def _update(
        self, run: _Run, params: Stack, goes_by: tuple[Any, Any, Sequence[Any]]
    ) -> None:
        """Update the leaves of a stack, one layer or block of rows at a time."""
        factor, is_finite, step_values = goes_by
        update = self.of_stack[params]
        gradient = run.gradients.pop(params)

        def block(contents: Sequence[Any], number: Any) -> list[Any]:
            """The stacks after the update of one layer or block."""
            old = [update.take(x, number) for x in contents[: len(update.read)]]
            grad = update.take(gradient, number)
            new = update.new(factor, is_finite, step_values, grad, old, number)
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


def _merged(
    same: Mapping[int, Any], carried: Sequence[int], given: Sequence[Any]
) -> list[Any]:
    """The inputs of an iteration, in order."""
    inputs = {**same, **dict(zip(carried, given, strict=True))}
    return [inputs[j] for j in sorted(inputs)]


def _on_host(content: Any) -> Any:
    """Content in host memory: it is there, except to jax on devices without memories.

    Those are the GPUs that are only compiled for. There `compile_for` takes from this
    operation that the argument is in host memory, and nothing is copied.
    """
    is_there = jax.typeof(content).memory_space == ON_HOST
    return content if is_there else jax.device_put(content, ON_HOST)


def _first(array: Any) -> Any:
    return array[0]


def _expanded(array: Any) -> Any:
    return array[None]
