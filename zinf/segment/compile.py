"""Executables of segments: forward, and backward from the inputs or from residuals.

Equal segments share one executable; what differs between them (hoisted literals) is
passed as arguments. Everything is compiled ahead of time, so that the plan knows the
workspace of each run before the first step, and a step never compiles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from zinf.jaxpr import Body, abstract
from zinf.jaxpr.keys import from_words, in_words, to_words
from zinf.program import ArraySpec, SegmentSpec
from zinf.segment.build import Segmented
from zinf.segment.residuals import Halves, halve


@dataclass(frozen=True)
class Workspace:
    """Device bytes that an executable takes beside its arguments and results."""

    forward_bytes: int
    backward_bytes: int


@dataclass(eq=False)
class _BodyExecutables:
    """The executables of one body, compiled at first use."""

    body: Body
    spec: SegmentSpec
    is_last: bool
    device: jax.Device
    abstract: tuple[jax.ShapeDtypeStruct, ...] = field(init=False)

    def __post_init__(self) -> None:
        sharding = SingleDeviceSharding(self.device)
        self.abstract = tuple(
            _placed(in_words(v.aval), sharding) for v in self.body.jaxpr.invars
        )

    def _compile(self, function: Callable, *extra: Any) -> Any:
        return jax.jit(function).lower(self.abstract, *extra).compile()

    @cached_property
    def forward(self) -> Any:
        return self._compile(self._call)

    @cached_property
    def backward(self) -> Any:
        """`(arguments, cotangents) -> gradients, input cotangents`.

        For the last segment `(arguments, seed) -> outputs, gradients, cotangents`.
        """
        if self.is_last:
            loss = self.body.jaxpr.outvars[0].aval
            sharding = SingleDeviceSharding(self.device)
            seed = jax.ShapeDtypeStruct((), loss.dtype, sharding=sharding)
            return self._compile(self._loss, seed)
        return self._compile(self._backward, self._cotangents)

    @cached_property
    def halves(self) -> Halves:
        """What a forward pass may keep for the backward pass; traced, not compiled."""
        first = len(self.spec.params)
        return halve(
            self._linearize,
            [abstract(a) for a in self.abstract],
            [abstract(c) for c in self._cotangents],
            inputs=slice(first, first + len(self.spec.inputs)),
        )

    @cached_property
    def forward_keeping(self) -> Any:
        """`arguments -> outputs, residuals`."""
        return self._compile(self.halves.run_forward)

    @cached_property
    def backward_from(self) -> Any:
        """`(arguments, residuals, cotangents) -> gradients, input cotangents`."""

        def run(arguments: Any, residuals: Any, cotangents: Any) -> Any:
            results = self.halves.run_backward(arguments, residuals, cotangents)
            return self._sort(results)

        sharding = SingleDeviceSharding(self.device)
        residuals = tuple(_placed(in_words(v.aval), sharding) for v in self.halves.kept)
        return self._compile(run, residuals, self._cotangents)

    @property
    def _cotangents(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the cotangents that a backward pass takes."""
        sharding = SingleDeviceSharding(self.device)
        pairs = zip(self.body.jaxpr.outvars, self._outputs, strict=True)
        return tuple(_placed(v.aval, sharding) for v, active in pairs if active)

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
        return list(cotangents[:num_params]), list(cotangents[num_params:])


@dataclass(frozen=True)
class Segment:
    """One runnable segment. Arguments and results are jax.Arrays on the device.

    `params` and `inputs` follow the order of its `SegmentSpec`; gradients that of its
    trained params, cotangents that of its active inputs and outputs.
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
        """What `forward_keeping` keeps; empty if nothing is worth it. Compiles nothing.

        The last segment, and one without a backward pass, have nothing to keep for.
        """
        if not self._may_keep:
            return ()
        return self.executables.halves.residuals()

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

    @property
    def _may_keep(self) -> bool:
        return self.spec.has_backward and not self.executables.is_last


def compile_segments(segmented: Segmented, device: jax.Device) -> tuple[Segment, ...]:
    """The runnable segments of a program on one device, executables shared by body."""
    specs = segmented.program.segments
    bodies: dict[int, _BodyExecutables] = {}
    segments = []
    for spec, shared in zip(specs, segmented.shared, strict=True):
        if spec.body not in bodies:
            is_last = spec is specs[-1]
            bodies[spec.body] = _BodyExecutables(shared.body, spec, is_last, device)
        segments.append(Segment(spec, bodies[spec.body], shared.hoisted))
    return tuple(segments)


def _placed(aval: Any, sharding: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _temporary_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)
