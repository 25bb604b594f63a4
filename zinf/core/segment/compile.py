"""Runnable segments: equal ones share the executables of one body.

The hoisted literals in which equal segments differ are passed as arguments. Everything
is compiled ahead of time, so that the plan knows each workspace before the first step,
and no step compiles.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from zinf.core.jaxpr.dims import NotByRow
from zinf.core.program import ArrayId, ArraySpec, Role, RowSum, SegmentSpec
from zinf.core.segment.build import Segmented
from zinf.core.segment.chosen import has_experts
from zinf.core.segment.executables import BodyExecutables, Workspace
from zinf.core.segment.halved import HalvedExecutables
from zinf.core.segment.leaves import array_spec
from zinf.core.sharding import Layout, Layouts
from zinf.core.topology import Collective, collectives_of

_Halved = tuple[HalvedExecutables, HalvedExecutables]
_Body = tuple[BodyExecutables, _Halved, str]
# Run in more blocks only if that takes less than this share of the workspace.
WORTHWHILE = 0.9
# Two blocks may take as much as all rows: a loop has copies of its own. Before it is
# given up, so many times more blocks are tried.
MANY = 16


@dataclass(frozen=True)
class Segment:
    """One runnable segment. Arguments and results are jax.Arrays on the devices.

    `params` and `inputs` are in the order of its `SegmentSpec`; a backward pass takes
    those in `read_backward`. Gradients are in the order of its trained params,
    cotangents in that of its active inputs and outputs. All are in the device forms of
    their layouts.

    Attributes:
        halved: the executables that keep residuals, then those that keep fewer.
        is_selective: whether it keeps fewer residuals.
        why_whole: why it does not run in as many blocks of rows as were asked for.
    """

    spec: SegmentSpec
    executables: BodyExecutables
    halved: _Halved
    hoisted: tuple[Any, ...]
    is_selective: bool = False
    why_whole: str = ""

    @property
    def keeping(self) -> HalvedExecutables:
        """The executables of `forward_keeping` and `backward_from`."""
        return self.halved[self.is_selective]

    def selective(self) -> "Segment":
        """This segment with fewer residuals, if there is a matmul that it can
        recompute.

        Compiles nothing.
        """
        if not self._may_keep:
            return self
        less = replace(self, is_selective=True)
        same = less.keeping.halves.residuals() == self.keeping.halves.residuals()
        return self if same else less

    def forward(
        self, params: Sequence[Any], inputs: Sequence[Any], caches: Sequence[Any] = ()
    ) -> list[Any]:
        """The outputs, in the order of `spec.outputs`, then the new `spec.caches`.

        The old caches are donated: the new ones take their memory.
        """
        arguments = (*params, *inputs, *self.hoisted)
        if self.spec.caches:
            return self.executables.forward(arguments, tuple(caches))
        return self.executables.forward(arguments)

    def backward(
        self, params: Sequence[Any], inputs: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`(gradients, input cotangents)`; runs the forward pass again inside.

        The gradients of `spec.row_sums` are rows; their row numbers follow all
        gradients.
        """
        arguments = (*params, *inputs, *self.hoisted)
        return self.executables.backward(arguments, tuple(cotangents))

    def residuals(self) -> tuple[ArraySpec, ...]:
        """The residuals that `forward_keeping` keeps, per device; empty if none is
        worth it.

        The last segment, and one without a backward pass, keep none; one that leaves
        rows looks them up again. Compiles nothing for one device.
        """
        if not self._may_keep:
            return ()
        keeping = self.keeping
        if not keeping.leaves_same_parts:
            return ()
        pairs = zip(keeping.halves.residuals(), keeping.residuals, strict=True)
        return tuple(replace(x, shape=s.shard_shape(x.shape)) for x, s in pairs)

    def forward_keeping(
        self, params: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`(outputs, residuals)`, in the orders of `forward` and `residuals()`."""
        assert self._may_keep, self.spec.name
        return self.keeping.forward((*params, *inputs, *self.hoisted))

    def backward_from(
        self,
        params: Sequence[Any],
        inputs: Sequence[Any],
        residuals: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """The results of `backward`, without running the forward pass again."""
        assert self._may_keep, self.spec.name
        arguments = (*params, *inputs, *self.hoisted)
        given = tuple(residuals), tuple(cotangents)
        return self.keeping.backward(arguments, *given)

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
        return self.executables.forward_bytes

    def workspace(self) -> Workspace:
        """Compiles the segment and reads what XLA says about its memory."""
        return self.executables.workspace

    def keeping_workspace(self) -> Workspace:
        """`workspace` of `forward_keeping` and `backward_from`."""
        assert self._may_keep, self.spec.name
        return self.keeping.workspace

    def traffic(self) -> dict[str, tuple[Collective, ...]]:
        """The collectives of the passes, "forward" and "backward", for `workspace`."""
        if self.executables.mesh.size == 1:
            return {}
        return self.executables.traffic

    def forward_traffic(self) -> tuple[Collective, ...]:
        """The collectives of its forward pass, also if it is the last segment."""
        if self.executables.mesh.size == 1:
            return ()
        return collectives_of(self.executables.forward)

    @property
    def _may_keep(self) -> bool:
        whole = self.executables
        is_simple = whole.num_blocks == 1 and not whole.is_last and not whole.lookups
        # Its weights would have to be fetched again too.
        is_simple = is_simple and not has_experts(whole.body.jaxpr)
        return self.spec.has_backward and is_simple


def compile_segments(
    segmented: Segmented,
    layouts: Layouts,
    max_workspace_bytes: int | None = None,
    *,
    accumulates: Collection[ArrayId] = (),
) -> tuple[tuple[Segment, ...], dict[str, Layout]]:
    """The runnable segments of a program, executables shared by body.

    Args:
        layouts: of persistent arrays, and of the values that no segment makes.
        max_workspace_bytes: segments that take more run in blocks of rows, if their
            rows are independent.
        accumulates: parameter arrays whose gradient is a sum over passes. A lookup
            leaves its part of such a gradient as rows.

    Returns:
        the segments, and the layout of every value.
    """
    specs = segmented.program.segments
    bodies: dict[Any, _Body] = {}
    values = dict(layouts.values)
    segments = []
    for spec, shared in zip(specs, segmented.shared, strict=True):
        params = tuple(map(layouts.of, spec.params))
        inputs = tuple(values[name] for name in (*spec.inputs, *spec.caches))
        trained = [a.of_role(Role.GRADIENT) for a in spec.trained_params]
        gradients = tuple(map(layouts.of, trained))
        sums = tuple(array in accumulates for array in spec.trained_params)
        parts = tuple(map(layouts.parts_of, spec.trained_params))
        key = spec.body, params, inputs, gradients, sums, parts
        if key not in bodies:
            is_last = segmented.program.is_trained and spec is specs[-1]
            whole = BodyExecutables(
                shared.body,
                spec,
                gradients,
                is_last,
                layouts.mesh,
                params,
                inputs,
                accumulates=sums,
                parts=parts,
            )
            why_whole = ""
            if max_workspace_bytes is not None:
                whole, why_whole = _in_blocks(whole, max_workspace_bytes)
            halved = HalvedExecutables(whole), HalvedExecutables(whole, True)
            if whole.lookups and halved[0].keeps_activations:
                whole = replace(whole, accumulates=())
                halved = HalvedExecutables(whole), HalvedExecutables(whole, True)
            bodies[key] = whole, halved, why_whole
        executables, halved, why_whole = bodies[key]
        results = (*spec.outputs, *spec.caches)
        values.update(zip(results, executables.outputs, strict=True))
        reads = zip(spec.params, executables.backward_reads, strict=True)
        read = tuple(array for array, is_read in reads if is_read)
        count = executables.num_blocks
        rows = _row_sums(executables, spec)
        pairs = zip(spec.trained_params, executables.leaves_parts, strict=False)
        in_parts = tuple(array for array, is_parts in pairs if is_parts)
        spec = replace(
            spec,
            backward_params=read,
            row_blocks=count,
            row_sums=rows,
            in_parts=in_parts,
        )
        segments.append(
            Segment(spec, executables, halved, shared.hoisted, why_whole=why_whole)
        )
    return tuple(segments), values


def _row_sums(executables: BodyExecutables, spec: SegmentSpec) -> tuple[RowSum, ...]:
    """The gradients of a segment that leave its backward pass as rows."""
    trained = spec.trained_params
    return tuple(
        RowSum(trained[i], array_spec(x.rows.aval), array_spec(x.numbers.aval))
        for i, x in executables.lookups.items()
    )


def _in_blocks(whole: BodyExecutables, max_bytes: int) -> tuple[BodyExecutables, str]:
    """Run in enough blocks of rows to need at most `max_bytes`.

    Returns:
        the passes, and why they need more than `max_bytes`; "" if they do not.
    """
    if whole.spec.caches:
        return whole, "it overwrites a cache"
    best = whole
    while (taken := _largest(best)) > max_bytes:
        wanted = max(2 * best.num_blocks, ceil(_largest(whole) / max_bytes))
        attempts = (replace(whole, num_blocks=n) for n in (wanted, MANY * wanted))
        enough = WORTHWHILE * taken
        try:
            better = next((x for x in attempts if _largest(x) < enough), None)
        except NotByRow as error:
            return best, str(error)
        if better is None:
            return best, "blocks of rows take as much"
        best = better
    return best, ""


def _largest(executables: BodyExecutables) -> int:
    space = executables.workspace
    return max(space.forward_bytes, space.backward_bytes)
