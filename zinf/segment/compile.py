"""Executables of segments: forward, and backward from the inputs or from residuals.

Equal segments share one executable; what differs between them (hoisted literals) is
passed as arguments. Everything is compiled ahead of time, so that the plan knows the
workspace of each run before the first step, and a step never compiles.

On a mesh of several devices each executable is one program for all of them: parameters
that are cut are gathered as it begins, gradients leave it cut, and what lies between
follows from how the batch is divided (GSPMD).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zinf.jaxpr import Body
from zinf.jaxpr.keys import from_words, in_words, to_words
from zinf.mesh import replicated
from zinf.program import ArraySpec, SegmentSpec
from zinf.segment.build import Segmented
from zinf.segment.residuals import Halves, halve
from zinf.sharding import (
    Layout,
    Layouts,
    cut,
    gather,
    placed_layout,
    whole_layout,
)
from zinf.topology import Collective, collectives, compile_for


@dataclass(frozen=True)
class Workspace:
    """Bytes of each device that an executable takes beside arguments and results."""

    forward_bytes: int
    backward_bytes: int


@dataclass(eq=False)
class _BodyExecutables:
    """The executables of one body, compiled at first use.

    Attributes:
        params, inputs: the layouts of its arguments; `gradients` those of its trained
            params' gradients.
    """

    body: Body
    spec: SegmentSpec
    is_last: bool
    mesh: Mesh
    params: tuple[Layout, ...]
    inputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    abstract: tuple[jax.ShapeDtypeStruct, ...] = field(init=False)

    def __post_init__(self) -> None:
        invars = self.body.jaxpr.invars
        hoisted = len(invars) - len(self.params) - len(self.inputs)
        layouts = (*self.params, *self.inputs, *[whole_layout((), self.mesh)] * hoisted)
        self.abstract = tuple(
            jax.ShapeDtypeStruct(
                layout.padded, in_words(v.aval).dtype, sharding=layout.device
            )
            for v, layout in zip(invars, layouts, strict=True)
        )

    def _compile(self, function: Callable, *extra: Any, results: Any) -> Any:
        """Compiles `function(arguments, *extra)`, given its arguments as wholes.

        Args:
            results: a pytree prefix of shardings; None leaves one to the compiler.
        """

        def on_wholes(arguments: Sequence[Any], *rest: Any) -> Any:
            return function(self._wholes(arguments), *rest)

        # Unused arguments stay, so that the compiler counts what the plan does.
        jitted = jax.jit(on_wholes, out_shardings=results, keep_unused=True)
        lowered = jitted.lower(self.abstract, *extra)
        return compile_for(self.mesh, lowered)

    def _wholes(self, arguments: Sequence[Any]) -> list[Any]:
        """Arguments as the body knows them: parameters gathered, without padding."""
        params = zip(arguments[: len(self.params)], self.params, strict=True)
        rest = arguments[len(self.params) :]
        return [*(gather(x, layout) for x, layout in params), *rest]

    @cached_property
    def forward(self) -> Any:
        # Without arguments, nothing else would say which devices it is for.
        is_made_here = not self.body.jaxpr.invars
        results = replicated(self.mesh) if self.is_last or is_made_here else None
        return self._compile(self._call, results=results)

    @cached_property
    def outputs(self) -> tuple[Layout, ...]:
        """Layouts of the outputs; those of the last segment are on every device."""
        kinds = [in_words(v.aval).shape for v in self.body.jaxpr.outvars]
        if self.is_last or self.mesh.size == 1:
            return tuple(whole_layout(shape, self.mesh) for shape in kinds)
        pairs = zip(kinds, self.forward.output_shardings, strict=True)
        return tuple(placed_layout(shape, sharding) for shape, sharding in pairs)

    @cached_property
    def backward(self) -> Any:
        """`(arguments, cotangents) -> gradients, input cotangents`.

        For the last segment `(arguments, seed) -> outputs, gradients, cotangents`.
        """
        if self.is_last:
            loss = self.body.jaxpr.outvars[0].aval
            everywhere = replicated(self.mesh)
            seed = jax.ShapeDtypeStruct((), loss.dtype, sharding=everywhere)
            results = everywhere, *self._backward_results
            return self._compile(self._loss, seed, results=results)
        results = self._backward_results
        return self._compile(self._backward, self._cotangents, results=results)

    @cached_property
    def traffic(self) -> dict[str, tuple[Collective, ...]]:
        """The collectives of the forward and the backward pass, where there is one."""
        passes = {}
        if not self.is_last:
            passes["forward"] = collectives(self.forward.as_text())
        if self.is_last or self.spec.has_backward:
            passes["backward"] = collectives(self.backward.as_text())
        return passes

    @cached_property
    def halves(self) -> Halves:
        """What a forward pass may keep for the backward pass; traced, not compiled."""
        first = len(self.spec.params)
        return halve(
            self._linearize,
            [in_words(v.aval) for v in self.body.jaxpr.invars],
            [in_words(c) for c in self._cotangents],
            inputs=slice(first, first + len(self.spec.inputs)),
        )

    @cached_property
    def forward_keeping(self) -> Any:
        """`arguments -> outputs, residuals`."""
        outputs = [layout.device for layout in self.outputs]
        results = outputs, [None] * len(self.halves.kept)
        return self._compile(self.halves.run_forward, results=results)

    @property
    def residuals(self) -> tuple[NamedSharding, ...]:
        """How what `forward_keeping` keeps lies on the devices."""
        if self.mesh.size == 1:
            return (replicated(self.mesh),) * len(self.halves.kept)
        return tuple(self.forward_keeping.output_shardings[1])

    @cached_property
    def backward_from(self) -> Any:
        """`(arguments, residuals, cotangents) -> gradients, input cotangents`."""

        def run(arguments: Any, residuals: Any, cotangents: Any) -> Any:
            results = self.halves.run_backward(arguments, residuals, cotangents)
            return self._sort(results)

        pairs = zip(self.halves.kept, self.residuals, strict=True)
        residuals = tuple(_placed(in_words(v.aval), sharding) for v, sharding in pairs)
        return self._compile(
            run, residuals, self._cotangents, results=self._backward_results
        )

    @property
    def _backward_results(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Shardings of gradients and input cotangents."""
        pairs = zip(self.spec.inputs, self.inputs, strict=True)
        active = [x.device for name, x in pairs if name in self.spec.active_inputs]
        return [layout.device for layout in self.gradients], active

    @property
    def _cotangents(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the cotangents that a backward pass takes."""
        triples = zip(self.body.jaxpr.outvars, self._outputs, self.outputs, strict=True)
        return tuple(
            _placed(v.aval, layout.device) for v, active, layout in triples if active
        )

    def _call(self, arguments: Sequence[Any]) -> list[Any]:
        """The body, with random keys going in and out as words."""
        kinds = [v.aval for v in self.body.jaxpr.invars]
        pairs = zip(arguments, kinds, strict=True)
        outputs = self.body(*(from_words(x, kind) for x, kind in pairs))
        return [to_words(y) for y in outputs]

    @property
    def _outputs(self) -> list[bool]:
        return [name in self.spec.active_outputs for name in self.spec.outputs]

    @property
    def _differentiated(self) -> list[bool]:
        active = set(self.spec.active_inputs)
        flags = [*self.spec.trainable, *(n in active for n in self.spec.inputs)]
        return flags + [False] * self.body.num_hoisted

    def _split(self, arguments: Sequence[Any]) -> tuple[list[Any], Callable]:
        """The differentiated arguments, and how to put them back among the others."""
        flags = self._differentiated
        chosen = [x for x, flag in zip(arguments, flags, strict=True) if flag]

        def merge(values: Sequence[Any]) -> list[Any]:
            rest = iter(values)
            pairs = zip(arguments, flags, strict=True)
            return [next(rest) if flag else x for x, flag in pairs]

        return chosen, merge

    def _backward(self, arguments: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        _, vjp = self._linearize(arguments)
        return self._sort(vjp(list(cotangents))[0])

    def _linearize(self, arguments: Sequence[Any]) -> tuple[list[Any], Callable]:
        """All outputs, and the vjp function of the active ones."""
        chosen, merge = self._split(arguments)

        def active_outputs(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outputs = self._call(merge(values))
            pairs = zip(outputs, self._outputs, strict=True)
            return [y for y, active in pairs if active], outputs

        _, vjp, outputs = jax.vjp(active_outputs, chosen, has_aux=True)
        return outputs, vjp

    def _loss(self, arguments: Sequence[Any], seed: Any) -> Any:
        chosen, merge = self._split(arguments)

        def loss_and_outputs(values: Sequence[Any]) -> tuple[Any, list[Any]]:
            outputs = self._call(merge(values))
            return outputs[0], outputs

        loss, vjp, outputs = jax.vjp(loss_and_outputs, chosen, has_aux=True)
        return outputs, *self._sort(vjp(jnp.asarray(seed, loss.dtype))[0])

    def _sort(self, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        num_params = sum(self.spec.trainable)
        gradients = zip(cotangents[:num_params], self.gradients, strict=True)
        return [cut(*pair) for pair in gradients], list(cotangents[num_params:])


@dataclass(frozen=True)
class Segment:
    """One runnable segment. Arguments and results are jax.Arrays on the devices.

    `params` and `inputs` follow the order of its `SegmentSpec`; gradients that of its
    trained params, cotangents that of its active inputs and outputs. All are in the
    device forms of their layouts.
    """

    spec: SegmentSpec
    executables: _BodyExecutables
    hoisted: tuple[Any, ...]

    def forward(self, params: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The outputs, in the order of `spec.outputs`."""
        return self.executables.forward((*params, *inputs, *self.hoisted))

    def backward(
        self, params: Sequence[Any], inputs: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`(gradients, input cotangents)`; runs the forward pass again inside."""
        arguments = (*params, *inputs, *self.hoisted)
        return self.executables.backward(arguments, tuple(cotangents))

    def residuals(self) -> tuple[ArraySpec, ...]:
        """What `forward_keeping` keeps on one device; empty if nothing is worth it.

        The last segment, and one without a backward pass, have nothing to keep for.
        Compiles nothing for one device.
        """
        if not self._may_keep:
            return ()
        pairs = zip(
            self.executables.halves.residuals(), self.executables.residuals, strict=True
        )
        return tuple(replace(x, shape=s.shard_shape(x.shape)) for x, s in pairs)

    def forward_keeping(
        self, params: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`(outputs, residuals)`, in the orders of `forward` and `residuals()`."""
        assert self._may_keep, self.spec.name
        return self.executables.forward_keeping((*params, *inputs, *self.hoisted))

    def backward_from(
        self,
        params: Sequence[Any],
        inputs: Sequence[Any],
        residuals: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """What `backward` returns, without running the forward pass again."""
        assert self._may_keep, self.spec.name
        arguments = (*params, *inputs, *self.hoisted)
        given = tuple(residuals), tuple(cotangents)
        return self.executables.backward_from(arguments, *given)

    def loss(
        self, params: Sequence[Any], inputs: Sequence[Any], seed: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """`(outputs, gradients, input cotangents)` of the last segment.

        `seed` is the cotangent of the loss: the loss scale over the number of
        microbatches. The outputs are not scaled.
        """
        arguments = (*params, *inputs, *self.hoisted)
        return self.executables.backward(arguments, seed)

    def evaluation_bytes(self) -> int:
        """Workspace of a forward pass alone, also of the last segment."""
        return _temporary_bytes(self.executables.forward)

    def workspace(self) -> Workspace:
        """Compiles the segment and reads what XLA says about its memory."""
        forward = 0
        if not self.executables.is_last:
            forward = _temporary_bytes(self.executables.forward)
        backward = 0
        if self.executables.is_last or self.spec.has_backward:
            backward = _temporary_bytes(self.executables.backward)
        return Workspace(forward, backward)

    def keeping_workspace(self) -> Workspace:
        """`workspace` of `forward_keeping` and `backward_from`."""
        assert self._may_keep, self.spec.name
        forward, backward = (
            _temporary_bytes(e)
            for e in (self.executables.forward_keeping, self.executables.backward_from)
        )
        return Workspace(forward, backward)

    def traffic(self) -> dict[str, tuple[Collective, ...]]:
        """What is sent between devices, by the passes that `workspace` is of."""
        if self.executables.mesh.size == 1:
            return {}
        return self.executables.traffic

    @property
    def _may_keep(self) -> bool:
        return self.spec.has_backward and not self.executables.is_last


def compile_segments(
    segmented: Segmented, layouts: Layouts
) -> tuple[tuple[Segment, ...], dict[str, Layout]]:
    """The runnable segments of a program, executables shared by body.

    Args:
        layouts: of persistent arrays, and of the values that no segment makes.

    Returns:
        the segments, and the layout of every value.
    """
    specs = segmented.program.segments
    bodies: dict[Any, _BodyExecutables] = {}
    values = dict(layouts.values)
    segments = []
    for spec, shared in zip(specs, segmented.shared, strict=True):
        params = tuple(map(layouts.of, spec.params))
        inputs = tuple(values[name] for name in spec.inputs)
        trained = [replace(array, role="gradient") for array in spec.trained_params]
        gradients = tuple(map(layouts.of, trained))
        key = spec.body, params, inputs, gradients
        if key not in bodies:
            is_last = spec is specs[-1]
            bodies[key] = _BodyExecutables(
                shared.body, spec, is_last, layouts.mesh, params, inputs, gradients
            )
        values.update(zip(spec.outputs, bodies[key].outputs, strict=True))
        segments.append(Segment(spec, bodies[key], shared.hoisted))
    return tuple(segments), values


def _placed(aval: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _temporary_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)
