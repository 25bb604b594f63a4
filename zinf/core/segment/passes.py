"""The passes of one body as traceable functions: forward, loss and vjp.

`BodyExecutables` compiles them one by one; an offloaded step traces all of them into
one program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zinf.core.jaxpr import Body
from zinf.core.jaxpr.keys import from_words, to_words
from zinf.core.program import SegmentSpec
from zinf.core.sharding import Layout, cut


@dataclass(eq=False)
class BodyPasses:
    """The passes of one body on whole arguments: params, inputs, hoisted literals.

    Attributes:
        gradients: the layouts of the gradients of its trained params.
    """

    body: Body
    spec: SegmentSpec
    gradients: tuple[Layout, ...]

    def call(self, arguments: Sequence[Any]) -> list[Any]:
        """The body, with random keys going in and out as words."""
        kinds = [v.aval for v in self.body.jaxpr.invars]
        pairs = zip(arguments, kinds, strict=True)
        outputs = self.body(*(from_words(x, kind) for x, kind in pairs))
        return [to_words(y) for y in outputs]

    @property
    def are_active(self) -> list[bool]:
        """For each output, whether the backward pass takes its cotangent."""
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

    def vjp(self, arguments: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the differentiated arguments."""
        _, vjp = self.linearize(arguments)
        return vjp(list(cotangents))[0]

    def linearize(self, arguments: Sequence[Any]) -> tuple[list[Any], Callable]:
        """All outputs, and the vjp function of the active ones."""
        chosen, merge = self._split(arguments)

        def active_outputs(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outputs = self.call(merge(values))
            pairs = zip(outputs, self.are_active, strict=True)
            return [y for y, active in pairs if active], outputs

        _, vjp, outputs = jax.vjp(active_outputs, chosen, has_aux=True)
        return outputs, vjp

    def loss(self, arguments: Sequence[Any], seed: Any) -> Any:
        """`(outputs, gradients, input cotangents)` of the last segment."""
        outputs, cotangents = self.loss_and_cotangents(arguments, seed)
        return outputs, *self.sort(cotangents)

    def loss_and_cotangents(
        self, arguments: Sequence[Any], seed: Any
    ) -> tuple[list[Any], list[Any]]:
        """The outputs of the last segment, and the cotangents as in `vjp`."""
        chosen, merge = self._split(arguments)

        def loss_and_outputs(values: Sequence[Any]) -> tuple[Any, list[Any]]:
            outputs = self.call(merge(values))
            return outputs[0], outputs

        loss, vjp, outputs = jax.vjp(loss_and_outputs, chosen, has_aux=True)
        return outputs, vjp(jnp.asarray(seed, loss.dtype))[0]

    def sort(self, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Cotangents as `(gradients in their device form, input cotangents)`."""
        num_params = sum(self.spec.trainable)
        gradients = zip(cotangents[:num_params], self.gradients, strict=True)
        return [cut(*pair) for pair in gradients], list(cotangents[num_params:])
