"""Executables of a forward pass that keeps residuals, and a backward pass from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zinf.core.jaxpr.keys import in_words
from zinf.core.segment.executables import (
    BodyExecutables,
    Workspace,
    placed,
    temporary_bytes,
)
from zinf.core.segment.residuals import Halves, halve
from zinf.core.sharding.mesh import replicated


@dataclass(eq=False)
class HalvedExecutables:
    """Both passes of one body, compiled at first use.

    Attributes:
        is_selective: whether matmuls that are cheap for their size are recomputed.
    """

    whole: BodyExecutables
    is_selective: bool = False

    @cached_property
    def halves(self) -> Halves:
        """The residuals that the forward pass keeps; traced, not compiled."""
        whole = self.whole
        first = len(whole.spec.params)
        return halve(
            whole.linearize,
            [in_words(v.aval) for v in whole.body.jaxpr.invars],
            [in_words(c) for c in whole.cotangents],
            inputs=slice(first, first + len(whole.spec.inputs)),
            is_selective=self.is_selective,
        )

    @property
    def keeps_activations(self) -> bool:
        """Whether there is more to keep than numbers of rows."""
        kinds = [v.aval.dtype for v in self.halves.kept]
        return any(jnp.issubdtype(kind, jnp.inexact) for kind in kinds)

    @cached_property
    def forward(self) -> Any:
        """`arguments -> outputs, residuals`."""
        outputs = [layout.device for layout in self.whole.outputs]
        results = outputs, [None] * len(self.halves.kept)
        return self.whole.compile(self.halves.run_forward, results=results)

    @property
    def residuals(self) -> tuple[NamedSharding, ...]:
        """Shardings of the residuals."""
        if self.whole.mesh.size == 1:
            return (replicated(self.whole.mesh),) * len(self.halves.kept)
        return tuple(self.forward.output_shardings[1])

    @cached_property
    def backward(self) -> Any:
        """`(arguments, residuals, cotangents) -> gradients, input cotangents`."""
        whole, given = self.whole, (self._kept, self.whole.cotangents)

        def run(arguments: Any, residuals: Any, cotangents: Any) -> Any:
            results = self.halves.run_backward(arguments, residuals, cotangents)
            return whole.sort(results)

        if any(whole.leaves_parts):
            in_parts = whole.in_parts(self._cotangents, *given)

            def run(*arguments: Any) -> Any:
                return in_parts(*arguments)[1:]

        return whole.compile(
            run,
            *given,
            results=whole.backward_results,
            reads=whole.backward_reads,
        )

    @property
    def _kept(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and shardings of the residuals."""
        pairs = zip(self.halves.kept, self.residuals, strict=True)
        return tuple(placed(in_words(v.aval), sharding) for v, sharding in pairs)

    def _cotangents(
        self, arguments: Any, residuals: Any, cotangents: Any
    ) -> tuple[tuple[()], list[Any]]:
        run = self.halves.run_backward
        return (), list(run(arguments, residuals, cotangents))

    @cached_property
    def leaves_same_parts(self) -> bool:
        """Whether the same gradients leave this backward pass as parts."""
        whole = self.whole
        if not any(whole.leaves_parts):
            return True
        given = self._kept, whole.cotangents
        return whole.find_parts(self._cotangents, *given)[1] == whole.leaves_parts

    @cached_property
    def workspace(self) -> Workspace:
        """Bytes that both passes take, by XLA; compiles them."""
        passes = self.forward, self.backward
        return Workspace(*map(temporary_bytes, passes))
