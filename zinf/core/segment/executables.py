"""Executables of one body: forward, and backward from the inputs.

On a mesh of several devices each executable is one program for all of them: sharded
parameters are gathered at its start, gradients leave it sharded, and the sharding of
all other values follows from that of the batch (GSPMD).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zinf.core.jaxpr import Graph, flatten, inline_all, trace
from zinf.core.jaxpr.keys import in_words
from zinf.core.segment.by_rows import by_rows
from zinf.core.segment.parts import PartialSums
from zinf.core.segment.passes import BodyPasses
from zinf.core.segment.row_sums import Lookup, find_lookups, leave_as_rows
from zinf.core.sharding import (
    AbstractParts,
    Layout,
    cut,
    gather,
    placed_layout,
    whole_layout,
)
from zinf.core.sharding.mesh import replicated
from zinf.core.sharding.parts import DEVICE_DIM
from zinf.core.topology import Collective, collectives_of, compile_for


@dataclass(frozen=True)
class Workspace:
    """Bytes per device that an executable takes besides arguments and results."""

    forward_bytes: int
    backward_bytes: int


@dataclass(eq=False)
class BodyExecutables(BodyPasses):
    """The executables of one body, compiled at first use.

    Attributes:
        params, inputs: the layouts of its arguments; the caches that it overwrites are
            the last inputs.
        num_blocks: the least number of blocks of rows of each pass. With more than one,
            compiling a pass raises `NotByRow` if its rows depend on each other.
        accumulates: for each trained param, whether its gradient is added to others.
            Then the gradient of a lookup leaves the backward pass as rows, and the row
            numbers follow all gradients.
        parts: for each trained param, how its gradient may leave the backward pass as
            one partial sum a device; None if it may not.
    """

    is_last: bool
    mesh: Mesh
    params: tuple[Layout, ...]
    inputs: tuple[Layout, ...]
    num_blocks: int = 1
    accumulates: tuple[bool, ...] = ()
    parts: tuple[AbstractParts | None, ...] = ()
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

    def compile(
        self,
        function: Callable,
        *extra: Any,
        results: Any,
        reads: Sequence[bool] | None = None,
    ) -> Any:
        """Compiles `function(arguments, *extra)`, given its arguments as wholes.

        Args:
            results: a pytree prefix of shardings; None leaves one to the compiler.
            reads: the params that it is given; the results do not depend on others.
        """
        flags = [True] * len(self.params) if reads is None else list(reads)
        flags += [True] * (len(self.abstract) - len(flags))
        pairs = zip(self.abstract, flags, strict=True)
        given = tuple(x for x, is_read in pairs if is_read)
        if self.num_blocks > 1:
            function = self._in_blocks(function, extra)

        def on_wholes(arguments: Sequence[Any], *rest: Any) -> Any:
            return function(self._wholes(arguments, flags), *rest)

        # Unused arguments stay, so that the compiler counts the bytes that the plan
        # counts.
        jitted = jax.jit(on_wholes, out_shardings=results, keep_unused=True)
        lowered = jitted.lower(given, *extra)
        return compile_for(self.mesh, lowered)

    @property
    def _whole_params(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the params as the body takes them."""
        return [
            jax.ShapeDtypeStruct(layout.shape, kind.dtype)
            for layout, kind in zip(self.params, self.abstract, strict=False)
        ]

    def _in_blocks(self, function: Callable, extra: Sequence[Any]) -> Callable:
        """A pass that runs one block of rows at a time; parameters have no rows."""
        num_params, num_values = len(self.params), len(self.params) + len(self.inputs)
        values = self.abstract[num_params:num_values]
        kinds = [v.aval for v in self.body.jaxpr.invars[num_params:num_values]]
        is_key = [jnp.issubdtype(k.dtype, jax.dtypes.prng_key) for k in kinds]
        hoisted = self.abstract[num_values:]
        rows = [
            *[{}] * num_params,
            *({} if k else _shards(x) for x, k in zip(values, is_key, strict=True)),
            *[{}] * len(hoisted),
            *map(_shards, jax.tree.leaves(extra)),
        ]
        arguments = [*self._whole_params, *values, *hoisted], *extra
        return by_rows(function, arguments, rows, self.num_blocks)

    def _wholes(self, arguments: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
        """The arguments of the body: parameters gathered, without padding.

        Parameters that are not given are zeros, which nothing reads.
        """
        rest = iter(arguments)
        wholes = []
        for kind, layout, is_given in zip(
            self.abstract, self.params, flags, strict=False
        ):
            if is_given:
                wholes.append(gather(next(rest), layout))
            else:
                wholes.append(jnp.zeros(layout.shape, kind.dtype))
        return [*wholes, *rest]

    @cached_property
    def backward_reads(self) -> tuple[bool, ...]:
        """Which params the backward pass reads; traced, not compiled."""
        if self.is_last or not any(self.are_active):
            return (True,) * len(self.params)
        graph = self.vjp_graph
        read = set(graph.needed_for(graph.outvars).used_invars())
        return tuple(v in read for v in graph.invars[: len(self.params)])

    @cached_property
    def vjp_graph(self) -> Graph:
        """`arguments, cotangents -> gradients, input cotangents`; not for the last."""
        outvars = zip(self.body.jaxpr.outvars, self.are_active, strict=True)
        cotangents = [in_words(v.aval) for v, active in outvars if active]
        arguments = [in_words(v.aval) for v in self.body.jaxpr.invars]
        closed, _ = trace(self.vjp, tuple(arguments), tuple(cotangents))
        return flatten(closed)

    @cached_property
    def lookups(self) -> dict[int, Lookup]:
        """The gradients that leave the backward pass as rows, by position.

        None on several devices, where rows would have to be exchanged; in blocks, which
        sum gradients; and for the last segment.
        """
        is_simple = self.mesh.size == 1 and self.num_blocks == 1
        has_vjp = not self.is_last and any(self.are_active)
        if not (is_simple and has_vjp and any(self.accumulates)):
            return {}
        found = find_lookups(self.vjp_graph, sum(self.spec.trainable))
        return {i: lookup for i, lookup in found.items() if self.accumulates[i]}

    @cached_property
    def forward(self) -> Any:
        # Without arguments, only the shardings of results name its devices.
        is_made_here = not self.body.jaxpr.invars
        results = replicated(self.mesh) if self.is_last or is_made_here else None
        if self.spec.caches:
            return self._compile_in_place(results)
        return self.compile(self.call, results=results)

    def _compile_in_place(self, results: Any) -> Any:
        """`(params, inputs and hoisted literals; caches) -> outputs, new caches`.

        The caches are donated. An argument of their own holds them, since `jax.jit`
        donates whole arguments.
        """
        end = len(self.params) + len(self.inputs)
        first = end - len(self.spec.caches)
        rest = (*self.abstract[:first], *self.abstract[end:])

        def in_place(arguments: Sequence[Any], caches: Sequence[Any]) -> list[Any]:
            given = (*arguments[:first], *caches, *arguments[first:])
            return self.call(self._wholes(given, (True,) * len(self.params)))

        # A cache stays as it is divided, or its memory could not be used again.
        caches = [layout.device for layout in self.inputs[-len(self.spec.caches) :]]
        placed = [results] * len(self.spec.outputs) + caches
        jitted = jax.jit(
            in_place, donate_argnums=1, out_shardings=placed, keep_unused=True
        )
        return compile_for(self.mesh, jitted.lower(rest, self.abstract[first:end]))

    # Equal segments share these: asking XLA takes milliseconds each time.
    @cached_property
    def workspace(self) -> Workspace:
        """Bytes that the forward and backward pass take, by XLA; compiles them."""
        forward = 0 if self.is_last else self.forward_bytes
        has_backward = self.is_last or self.spec.has_backward
        backward = temporary_bytes(self.backward) if has_backward else 0
        return Workspace(forward, backward)

    @cached_property
    def forward_bytes(self) -> int:
        """Temporaries, and new caches that do not take the memory of the old ones."""
        analysis = self.forward.memory_analysis()
        if analysis is None:
            return 0
        taken = int(analysis.temp_size_in_bytes)
        in_place = int(analysis.alias_size_in_bytes)
        return taken + max(0, self.cache_bytes - in_place)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches that it overwrites."""
        end = len(self.params) + len(self.inputs)
        caches = self.abstract[end - len(self.spec.caches) : end]
        return sum(x.size * x.dtype.itemsize for x in caches)

    @cached_property
    def outputs(self) -> tuple[Layout, ...]:
        """Layouts of the outputs; those of the last segment are replicated."""
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
            results = everywhere, *self.backward_results
            run = self.loss
            if any(self.leaves_parts):
                run = self.in_parts(self.loss_and_cotangents, seed)
            return self.compile(run, seed, results=results)
        results, run = self.backward_results, self._backward
        if any(self.leaves_parts):
            pass_alone = self.in_parts(self._cotangents, self.cotangents)

            def run(*arguments: Any) -> Any:
                return pass_alone(*arguments)[1:]

        return self.compile(
            run,
            self.cotangents,
            results=results,
            reads=self.backward_reads,
        )

    @cached_property
    def leaves_parts(self) -> tuple[bool, ...]:
        """For each trained param, whether its gradient leaves the pass as parts.

        None does in blocks of rows, whose sums are added up over the blocks.
        """
        if self.num_blocks > 1 or not any(self.parts):
            return (False,) * sum(self.spec.trainable)
        if self.is_last:
            loss = self.body.jaxpr.outvars[0].aval
            seed = jax.ShapeDtypeStruct((), loss.dtype)
            return self.find_parts(self.loss_and_cotangents, seed)[1]
        return self.find_parts(self._cotangents, self.cotangents)[1]

    def find_parts(
        self, function: Callable, *extra: Any
    ) -> tuple[PartialSums, tuple[bool, ...]]:
        """The partial sums of a pass, and for each trained param if it ends in one.

        Args:
            function: `(arguments, *extra) -> outputs, cotangents as in vjp`.
        """
        count = len(self.params)
        arguments = [*self._whole_params, *self.abstract[count:]], *extra
        closed, (outputs, _) = trace(function, *arguments)
        graph = inline_all(closed)
        leaves = jax.tree.leaves(arguments)
        found = {v: self._row_dim(x) for v, x in zip(graph.invars, leaves, strict=True)}
        seeds = {v: dim for v, dim in found.items() if dim is not None}
        first = len(outputs)
        wanted = [first + i for i, parts in enumerate(self.parts) if parts is not None]
        sums = PartialSums(graph, seeds, wanted, self.mesh.size)
        flags = (first + i in sums.numbers for i in range(sum(self.spec.trainable)))
        return sums, tuple(flags)

    def _row_dim(self, value: jax.ShapeDtypeStruct) -> int | None:
        """The dim that all devices divide; None if there is none."""
        if value.sharding is None:
            return None
        sizes = zip(value.shape, value.sharding.shard_shape(value.shape), strict=True)
        dims = [d for d, (n, own) in enumerate(sizes) if n == own * self.mesh.size]
        return dims[0] if dims else None

    def in_parts(self, function: Callable, *extra: Any) -> Callable:
        """`(arguments, *extra) -> outputs, gradients, input cotangents` of a pass.

        Gradients of which `leaves_parts` says so are in the layout of their parts.
        """
        sums, flags = self.find_parts(function, *extra)
        assert flags == self.leaves_parts, self.spec.name
        first, end = len(sums.graph.outvars), len(flags)
        first -= end + len(self.spec.active_inputs)
        by_device = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

        def run(*arguments: Any) -> Any:
            results = sums.run(jax.tree.leaves(arguments), by_device)
            outputs, cotangents = results[:first], results[first:]
            gradients = [
                jnp.moveaxis(g, 0, DEVICE_DIM) if is_parts else cut(g, layout)
                for g, is_parts, layout in zip(
                    cotangents[:end], flags, self.gradients, strict=True
                )
            ]
            return outputs, gradients, cotangents[end:]

        return run

    def _cotangents(
        self, arguments: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[tuple[()], list[Any]]:
        return (), self.vjp(arguments, cotangents)

    @cached_property
    def traffic(self) -> dict[str, tuple[Collective, ...]]:
        """The collectives of each pass that the segment has: forward, backward."""
        passes = {}
        if not self.is_last:
            passes["forward"] = collectives_of(self.forward)
        if self.is_last or self.spec.has_backward:
            passes["backward"] = collectives_of(self.backward)
        return passes

    @property
    def backward_results(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Shardings of gradients and input cotangents."""
        pairs = zip(self.spec.inputs, self.inputs, strict=True)
        active = [x.device for name, x in pairs if name in self.spec.active_inputs]
        gradients = [layout.device for layout in self.gradients]
        for i, is_parts in enumerate(self.leaves_parts):
            if is_parts and (parts := self.parts[i]) is not None:
                gradients[i] = parts.layout.device
        return gradients + [replicated(self.mesh)] * len(self.lookups), active

    @property
    def cotangents(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the cotangents that a backward pass takes."""
        triples = zip(
            self.body.jaxpr.outvars, self.are_active, self.outputs, strict=True
        )
        return tuple(
            placed(v.aval, layout.device) for v, active, layout in triples if active
        )

    def _backward(self, arguments: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        if not self.lookups:
            return self.sort(self.vjp(arguments, cotangents))
        # One device, so that nothing is cut.
        graph = leave_as_rows(self.vjp_graph, self.lookups)
        results = graph(*arguments, *cotangents)
        first, end = sum(self.spec.trainable), len(results) - len(self.lookups)
        return [*results[:first], *results[end:]], results[first:end]


def _shards(value: jax.ShapeDtypeStruct) -> dict[int, int]:
    """For each dim, the number of devices that divide it.

    Dims of which each device has one entry are left out.
    """
    assert isinstance(value.sharding, NamedSharding)
    sizes = value.sharding.shard_shape(value.shape)
    return {d: n // sizes[d] for d, n in enumerate(value.shape) if sizes[d] > 1}


def placed(aval: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def temporary_bytes(compiled: Any) -> int:
    """Bytes that a compiled program takes besides arguments and results."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)
