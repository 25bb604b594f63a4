"""Executables of segments: forward, and backward that recomputes from the inputs.

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

from zinf.jaxpr import Body
from zinf.jaxpr.keys import from_words, in_words, to_words
from zinf.program import SegmentSpec
from zinf.segment.build import Segmented


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
        sharding = SingleDeviceSharding(self.device)
        if self.is_last:
            loss = self.body.jaxpr.outvars[0].aval
            seed = jax.ShapeDtypeStruct((), loss.dtype, sharding=sharding)
            return self._compile(self._loss, seed)
        cotangents = tuple(
            _placed(v.aval, sharding)
            for v, active in zip(self.body.jaxpr.outvars, self._outputs, strict=True)
            if active
        )
        return self._compile(self._backward, cotangents)

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
        chosen, merge = self._split(arguments)

        def active_outputs(values: Sequence[Any]) -> list[Any]:
            outputs = self._call(merge(values))
            return [y for y, keep in zip(outputs, self._outputs, strict=True) if keep]

        _, vjp = jax.vjp(active_outputs, chosen)
        return self._sort(vjp(list(cotangents))[0])

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
